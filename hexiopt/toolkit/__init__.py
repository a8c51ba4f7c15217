"""What `import hexiopt` adds to the laws: plans and results that know their problem, comparisons, sweeps."""
