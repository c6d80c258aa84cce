"""Pipeline schedules: draw, compare and change them. No torch, no GPU."""

import fivefold as ff

# In a notebook the last line of a cell is enough: the result shows itself as a picture.
print(ff.draw("1f1b", "zb-v", pp=4, microbatches=8))

# A rank that takes 1.5 times as long, and messages that take time: `auto` makes a schedule for that.
compared = ff.draw("1f1b", "zb-h1", "auto", pp=4, microbatches=8, times="f=1,i=1,w=1,comm=0.1", slow={1: 1.5})
for simulation in compared.simulations:
    print(f"{simulation.schedule.name:6} bubble {simulation.bubble_makespan:.1%}")

# A schedule is an object: an ordered list of actions per rank.
schedule = ff.schedule("zb-h1", pp=2, microbatches=4)
print(*schedule.ranks[0])
with open("schedule.svg", "w") as file:
    file.write(ff.draw(schedule).svg())
