# %% [markdown]
# # A cluster
#
# From a model to a job of Slurm, without a cluster at hand: plan, look at the nodes, print the job.

# %%
import contextlib
import io
import sys

from shardwright.cli.main import app


def shardwright(*arguments, begin="", lines=None):
    """Runs the command in this process, and prints what it says from the line on that begins so."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        app(arguments, standalone_mode=False)
    found = said.getvalue()
    found = found[found.index(begin) :].replace(sys.executable, "python")
    print("\n".join(line.rstrip() for line in found.splitlines()[:lines]))


MODEL = ["--set", "num_layers=2", "--set", "width=64", "--set", "num_heads=4", "--seq", "32"]

# %% [markdown]
# ## Which layout?
#
# `plan` searches all layouts of two nodes with two devices each, and prices the best. It needs no device. The model
# here is tiny, so that the page runs in seconds: nothing of it is worth sending, and almost all of the time is what a
# step costs anyway. [Which layout?](../../docs/which_layout.md) plans a model of 13 billion parameters.

# %%
shardwright("plan", *MODEL, "--batch", "16", "--cluster", "a100-80gb:2x2")

# %% [markdown]
# ## Where does each axis lie?
#
# Tensor parallelism sends in every layer, so it should stay inside of a node. `show --nodes` says what crosses.

# %%
shardwright("show", "--layout", "pp2 mb2 tp2", *MODEL, "--nodes", "2x2", begin="nodes  ", lines=6)

# %% [markdown]
# ## The job
#
# `launch --dry-run` checks the layout and the options of `train` behind `--`, and prints the script; without
# `--dry-run` it submits it. The job saves before its time is over, is queued again, and goes on from the newest
# checkpoint.

# %%
shardwright(
    "launch", "--slurm", "pp2 mb2 tp2", "--nodes", "2x2", "--time", "4:00:00", "--out", "/shared/my-run", "--dry-run",
    "--", "--steps", "1000", "--save-every", "100",
)  # fmt: skip

# %% [markdown]
# The same for Kubernetes (`--k8s`) and Ray (`--ray`). [Clusters](../../docs/cluster.md) has torchrun, what happens when
# a node is lost, and what was run where. No job of this library has run on several machines with GPUs yet.
#
# A program of your own needs no command: start the file with `torchrun`, and `sw.launch` joins the ranks that are
# there.
