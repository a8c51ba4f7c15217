"""The cost model in flat arrays, compiled: thousands of candidates a second on one core.

A *candidate* is a list of pipelines, each an ordered list of stages on parts of machines, with a micro-batch size a
pipeline and one sharding mode for all. Layers, recompute policies and micro-batches follow from it, as
`solvers/completion` makes them; what it costs is estimated as `PlanPricer` prices that plan, but for how often messages
meet (`messages.py`). `unsupported` says for which problems this does not hold.

*Tables* (`tables.py`): a problem as arrays, made once; never written. Machines, sizes, classes of TP groups ("groups")
and recompute policies are rows; `devices` are bits of a mask in their machine, so a machine has at most 62.

*State* (`state.py`): a candidate and its times. Moves write what is marked (*); the evaluator writes all else.
- `plan[0]`: num_pipelines*, zero_stage*, by_machine* (sharding groups are machines), policy* (the only one of all
  stages; -1: any), forwards_first*; holders (of states, as the layers assume), apart (1: twice as many
  of those of a tied matrix), step_s, pipeline_s, relaxed_s.
- `pipelines[p]`: num_stages*, size* (row of `tables.sizes`); fits, batches, in_flight (assumed), missing (layers that
  do not fit), end_s (of `timed` micro-batches), period_s, shape.
- `stages[p, s]`: machine*, mask*; degree, group (row of the TP class, -1: not allowed), layers, depth (micro-batches in
  flight at most, where not all forwards come first), forward_s, backward_s, late_s (of the backward, what is put off),
  send_s (message to the next stage), return_s (message back), early_s (ends so long before its pipeline), room (groups
  summing gradients beyond the reserved ones that it leaves memory for), sums (those that it has), holders.
- `free[m]`*: mask of the usable devices of machine m that no stage has. Moves keep it in step with `stages`.

*Work* (`state.py`): scratch arrays of one thread, and what it knows of stages (`option_*`); one for any number of
states of the same tables.

`@entry` marks what Python calls, `@kernel` what compiled code alone does (`kernels.py`); all are `nogil` and allocate
nothing. Entry points:
- `new_state(tables)`, `new_work(tables)`: Python, allocate.
- `touch(work, p)`: pipeline `p` has changed; `forget_touched(work)` before the next candidate; `touch_all(work,
  state)`.
- `copy_state(source, target)`: all rows in use; `copy_rows(work, source, target)`: the touched ones only.
- `evaluate(tables, work, state, limit)`: the objective of a candidate of which the touched pipelines are new: the
  seconds of a step, plus a share of the relaxed batch split (so that it has a slope where steps jump by a micro-batch),
  plus a little for layers that do not fit; infinite, and times unfinished, where it is certainly above `limit`.
  Seconds: `plan[0].step_s`. Pipelines that do not fit are idle. `work.active[:k]`, `work.batches[:k]`: those
  that fit, and their micro-batches.
- `refresh(tables, work, state)`: evaluate from nothing, until groups that sum gradients have room.
- `split(tables, work, state, p)`: layers of one pipeline alone.
- `tables_of(pricer)`, `unsupported(problem, pricer)`: tables, and why there are none.
- `plans.py`: `plan_of` and `partition_of` a state, `state_of` a plan.
"""
