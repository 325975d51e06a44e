"""A model of the wire, small enough to be searched whole, and the proof that it is the wire as built.

| module | what it models |
|---|---|
| `state` | what the server holds of a job, what its owners and readers remember; the canonical form of a state |
| `scripts` | each Lua script, as a function from what the server holds to an answer and what it holds then |
| `reader` | `producer/reader.py`: how a reader counts, and when it reads again |
| `owner` | `worker/outbox.py`, `publisher.py`, `recovery.py`: what an owner sends, and how it gets a stream back |
| `actions` | who may do what next, and what may go wrong: crash, pause, lost replies and requests, failover |
| `properties` | what must hold in each state, of each step, and that an end stays within reach |
| `explore` | every state that can be reached, breadth first, with the shortest way to one that is wrong |
| `sizes` | the small worlds that are searched |
| `mutations` | faults that are planted in the model one by one; each must break a property that is named |
| `walk` | random walks of the real wire, each step repeated in the model, and a look at all that can be seen |
| `server` | what the real server holds, as the model has it; a replica that is behind |
| `people` | the worker's real outbox and the real reader, beside their counterparts |

One script is one step, since the server runs it alone. Everything between two commands may be interleaved with
everybody else's steps, so that a worker that is stopped (SIGSTOP) and wakes later is one that takes no step for a
while; only that its lease ends meanwhile has to be an action of its own.

A walk takes only steps that the model offers, and compares the answer, every key of the job, the owner's outbox and the
reader's place after each. So the properties that were searched in the model hold of the wire as far as the two agree.

What is abstract: tokens are their indexes (the same request generates the same tokens whoever runs it); epochs are
ranks, as only their order counts; times are "before" and "after" a lease's end or a deadline. Left out, and covered by
`tests/scripts/`: places in the queue, estimates, dead letters, readers' presence, plain arq jobs, broken keys, a full
server.
"""
