"""Pipeline schedules as data: built, proven, timed, drawn and executed as one and the same object.

    schedule = prove(build("zb-v", p=4, m=8))    # registry.build, check.prove
    simulate(schedule).bubble_makespan           # simulate.simulate

`actions` has the words, `schedule` the object, `registry` every builder by name, `check` the proofs, `costs` and
`simulate` the clock, `text` the written form, `draw` the pictures. Nothing here needs torch.
"""
