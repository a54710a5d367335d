"""One light module per command (argparse only); what a command does is in a module of its own, imported when chosen."""

COMMANDS = (
    "run",
    "submit",
    "status",
    "resume_plan",
    "plan",
    "doctor",
    "data",
    "buffer",
    "weights",
    "advantages",
    "batch_plan",
    "replay",
    "bench",
)
