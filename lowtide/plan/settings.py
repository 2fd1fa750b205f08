"""The numbers of the planner that could be others: units, meanings, and where each value comes from.

In brackets at the end stands the source: the number of the decision note that gives the value, or `chosen` where no
measurement of it is on record. Any value gives valid plans; others give quicker or slower ones, after a longer or
shorter search. Those of the inner loops in C++ are in `settings.hpp`. What arithmetic forces (scales, codes, widths of
words) is not here.
"""

from __future__ import annotations

# ------------------------------------------------------------------------------------------------ planning.py: one plan
TIME_LIMIT = 6.0  # seconds of search for one plan, unless the caller says otherwise [chosen]
CLOSE_TO_BOUND = 0.001  # of the step's seconds: a plan this near its bound needs no better bound [0009]
PROOF_SHARE = 0.125  # of the time limit: for a bound before the race, which it may make needless [0099]
SMALL_GRAPH = 64  # ops: a graph that may be solved exactly [0009]
SMALL_GRAPH_STATES = 200_000  # states that the exact solver may meet for it [0009]
ARENA_ATTEMPTS = 8  # searches to get an arena into the budget, each time with a little less in use [chosen]
ARENA_STEP = 0.4  # of what the arena has too much: how much lower the next search aims [chosen]
SLIGHT_EXCESS = (
    0.002  # of the budget: an excess from rounding and saved generator states, aimed lower by whole [chosen]
)
MIXED_SHARE = 0.5  # of the time limit: for plans that mix copies with second runs, from the best of each alone [0038]
SAME_SECONDS = 1e-9  # of a step: what sums in another order may differ by [chosen]
FAR_OVER = 1.05  # times the budget: what the simulator can count otherwise is less [chosen]

# ------------------------------------------------------------------------ recompute.py: shaving, and a race of searches
PLACES_A_SECOND = 150_000_000  # places of sequences that a search looks at for each second that it is given [chosen]
STARTS_SHARE = 0.2  # of the work: for the starts [chosen]
START_PLACES = 50_000_000  # places that are looked at before one start is given up [chosen]
SHAVING_GROWTH = 8  # times the ops of the graph: a sequence may become so long [chosen]
SHAVING_PATIENCE = 4.0  # times the seconds of the step, before a start is given up [chosen]
SHAVING_ROUNDS = 20_000  # rounds of shaving [chosen]
MANNERS = ((4, 0.0), (16, 1.0), (1, 1.0), (16, 0.0), (4, 1.0), (1, 0.0))  # values at a time, penalty for width [chosen]
COPY_PRICES = (0.05, 1.0, 0.3)  # seconds that a second of copying is held to cost, for starts with copies [chosen]
RACE_STAGES = ((6, 0.25), (2, 0.55))  # of the race: how many run, and their share of the work; it is 0009's [chosen]
RACE_SLICES = 10  # parts of one search, between which the clock is looked at [chosen]
TEMPERATURE = 0.004  # of the step's seconds: how much slower a sequence may become at first; it falls to 0 [chosen]
SMALLEST_VALUE = 1e-4  # of the largest value's bytes: smaller ones are not let go [chosen]
LOWEST_PLACES = 400_000_000  # places that are looked at for the least peak [chosen]
LOWEST_TRIES = 300  # sequences at most that are tried for it [chosen]
LOWEST_POOL = 6  # sequences with low peaks that are tried again [chosen]
LOWERINGS = (0.5, 0.8, 0.95, 0.99)  # of the peak: what is aimed for, when the least is looked for [chosen]

# ---------------------------------------------------------------------- plain.py: the same without a compiler, in numpy
PLAIN_PLACE = 40  # places of search.cpp that a place here counts as, in work [chosen]
PLAIN_ROUND = 1000  # places that a round of shaving counts as, besides those that it looks at [chosen]
PLAIN_LOOK = 10  # places that a look at what must run again counts as [chosen]
PLAIN_TRIAL = 50  # places that an attempt to drop a run counts as [chosen]
PLAIN_LONGEST = 3000  # runs that may be repeated to have one value again [chosen]
TOGETHER = 1.5  # times the least score: values up to here may go in one round; as in settings.hpp [chosen]

# ------------------------------------------------------------------------------------ bound.py: gates, alone and joined
GATES_SCREENED = 200  # gates that are tried at one price [chosen]
GATES_SEARCHED = 6  # of these, gates whose best price is looked for [chosen]
GATES_JOINING = 16  # gates that may join another [chosen]
GATES_TOGETHER = (2, 3, 5)  # gates whose program is solved in whole numbers; forty bound worse than five [0009]
TINY_VALUE = 1e-3  # of the budget: smaller values are taken as kept for nothing [chosen]
JOINT_VARIABLES = 60_000  # variables of a joint program that is worth trying [chosen]

# ----------------------------------------------------------------------------- exact.py and pebble.py: states of graphs
EXACT_STATES = 1_000_000  # states, of about 100 bytes each, so 100 MB [chosen]
EXACT_LONGEST = 64  # times the ops of the graph: the longest sequence [chosen]
WINDOWS_IMPROVED = 200  # windows of an order that are improved [chosen]
WINDOW_STATES = 5_000  # states in one window [chosen]
LARGEST_IMPROVED = 8_000  # ops: beyond it an order is made greedily, and not improved [chosen]

# -------------------------------------------------------------------------------------- layout.py: offsets in the arena
LAYOUT_STEPS = 400_000  # steps of the search for one height: a second or less [chosen]
LAYOUT_HEIGHTS = 6  # heights that are tried at most [chosen]
LAYOUT_RESTART = 5  # steps for each buffer, after which the search begins anew [chosen]
LARGE_BUFFERS = (0, 1e-4, 1e-2)  # of the live bytes: larger buffers are searched for, others fill the holes [chosen]
LAYOUT_NOISE = 0.5  # of the logarithm of a buffer's weight [chosen]
CLOSE_TO_LIVE = 1.01  # times the live bytes: good enough for an arena that has the room [chosen]
NEAR_LIVE = 1.001  # times the live bytes: good enough for blocks not to move out of the arena [chosen]
MOVING_PARTS = tuple(part / 20 for part in range(20, 1, -1))  # of the arena: tried when blocks move out [chosen]
APART = (
    6_000  # buffers: so many are packed window by window, where an order has windows; all at once takes minutes [0065]
)
MOVING_BLOCKS = 32  # blocks that may move out, the largest at the peak [chosen]

# -------------------------------------------------------------------------------------- loop.py: the schedule of a scan
EXACT_LENGTH = 1200  # time steps that are planned exactly, in 0.1 to 0.4 s of CPU time; longer loops are split [0011]
FINE_LENGTHS = 400  # lengths of a longer loop of which each is in the table: less than 1% more forwards [0011]
COARSE_LENGTHS = 400  # the other lengths in it, at most [0011]
TABLE_ROUND = 100  # time steps: tables serve all lengths up to a multiple of this [chosen]
TABLE_WORK = 4e8  # additions for a table: some tenths of a second [chosen]
TABLE_LEVELS = 4000  # amounts of room in a table, at most [chosen]
CELLS_A_STATE = 10  # cells kept for each state stored, where there is so much room that a grid is needed [chosen]

# ----------------------------------------------------------------------------------------- classics/: chains and tables
ROTOR_STAGES = 200  # segments of rotor, whose tables grow with the third power [chosen]
MENU_LEVELS = (
    120,
    50,
    30,
    16,
)  # segments with menus: long ones have the better menus, short ones fit into less [chosen]
MENU_PRICES = 12  # prices of a byte, for the menus [chosen]
MENU_FEW = 16  # internals: of so many every one is tried at every step [chosen]
LARGEST_ALPHA = 8  # states that the internals of a step count as, at most, in Gruslys' slots [chosen]
TABLELESS_SEGMENTS = 20_000  # segments of what needs no tables [chosen]
LONG_CHAIN_SLOTS = 128  # slots in the tables of longer chains [chosen]
FINEST = 1024  # segments of a chain of equal steps [chosen]
GROUPINGS = 24  # groupings that Chen's search tries, as far as they replay no more ops than the next line [chosen]
REPLAYED = 300_000  # ops that they replay in all, but six groupings at least [chosen for 0013]
LEVELLED = 60_000  # ops of all chains that are measured for one step, but one chain at least [chosen for 0013]
MEMORY_UNITS = 400  # units of memory that a budget is divided into [chosen]
HEADROOM = 1.15  # times the budget: tables add up what is rarely there at the same time [chosen]
SEGMENTS = 350  # segments of a chain: the dynamic programs grow with the third power [chosen]
WINDOWS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # ops that make something, beside a cut [chosen]
NOT_WORTH_DROPPING = 0.005  # of all bytes that the forward makes: those of the smallest values [chosen for 0013]
WIDEST_CROSSING = 64  # segments: what crosses more of them is kept, or all carry long lists along [chosen for 0013]
USELESS = 1.01  # what a crossing byte counts that no backward op reads: of equal places the useful one is cut [chosen]

# --------------------------------------------------------------------------- stretches.py: segments that may run as one
STRETCH_SEGMENTS = 120  # segments of the chain: the tables grow with the third power; 170 gain 0.01 points [0040]
STRETCH_LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)  # segments that may run as one [0040]
STRETCH_OPS_A_SECOND = 5_000  # ops of stretches that are measured, for each second of search [0040]
STRETCH_CLASSES = 1 / 3  # of the segments: so few are unlike each other in a step that is worth it [0040]
STRETCH_LEAD = 0.005  # of the step's seconds: they join the race where they are so much ahead of other starts [0040]
STRETCH_RACE = 0.8  # of the work of a race that they join: the rest is what they took themselves [0040]
STRETCH_GAP = 0.003  # of the step's seconds: other starts that are this near the bound are good enough [0040]

# --------------------------------------------------------------------- windows.py: an order cut where it holds little
WAISTS = (
    0.05,
    0.1,
    0.2,
    0.4,
)  # of the order's peak without what persists: bytes at which it is cut, the fewest first [0065]
WINDOW_LEAST = 3  # windows of an order that is worth it [0065]
WINDOW_CLASSES = 1 / 2  # of the windows: so few are unlike each other in an order that is worth it [0065]
WINDOW_SHARE = 0.5  # of the time limit: for the windows that are unlike each other, each with its part [0065]
