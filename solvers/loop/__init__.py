"""One search over candidates of the compiled cost model (`solvers/compiled/`), the inside of the default.

- `starts.py`, `templates.py`, `orders.py`: candidates to begin from: chains of a catalogue, as many of each as lower
  the step or as a linear programme says; devices dealt out at random; a known plan; of a few devices, every order.
- `grids.py`: symmetric candidates to begin from, searched by the few numbers that say them.
- `stage_moves.py`, `pipeline_moves.py`, `rebuild.py` (on `edits.py`, `dice.py`): the moves. To add one, write
  `move(tables, work, state, kit) -> changed` as a `@kernel`, and list it in `walk.py`, in `MOVES` and `propose`. The
  tests hold that it uses every device once; what it brings, `hexiopt compare` writes to `operators.csv`.
- `walk.py`: a random walk of moves. `tempering.py`: some of them at rungs of temperatures, which exchange places, on
  any number of threads; each move is drawn as often as it has lowered objectives for its work.
- `search.py`: one run; exact prices of the best candidates between rounds. `finish.py`: what the arrays do not say.
- `settings.py`: the five parameters.
"""
