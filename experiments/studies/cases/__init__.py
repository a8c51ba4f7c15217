"""The problems of studies, and what judges their plans: functions that the processes of searches import."""
