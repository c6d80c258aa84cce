"""How long a step of one layout takes, and where the time goes. No torch, no GPU."""

import fivefold as ff

# Three schedules for the same pipeline of eight ranks. Text and objects are both fine.
for name in ("1f1b", "zb-h1", "zb-v"):
    layout = ff.Layout(pp=8, schedule=name, microbatches=16)
    result = ff.simulate("llama3-8b", layout, "8xH200", batch=16)
    print(f"{name:6} {result.option.seconds:.3f} s a step")

# All that is known of the last one: time by cause, memory, traffic.
print(result)
