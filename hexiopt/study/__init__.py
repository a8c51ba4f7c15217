"""The parts behind `import hexiopt`: plans and results that know their problem, comparisons, sweeps, progress."""
