"""The way from FlashAttention-2's kernel to the project's own, a step at a time.

    step                       file          differs from the step before in
    1  cp.async and mma.sync   cp_async.py
    2  TMA                     tma.py        how tiles come to shared memory
    3  WGMMA                   tma.py        what multiplies
    4  roles                   roles.py      who copies and who multiplies
    5- the project's forward   roles.py      a value of the schedule each

`cutedsl_fa3/ladder.py` lists the steps with their schedules. Each kernel takes a Plan, as the
forward does, and is launched with the same arguments.
"""
