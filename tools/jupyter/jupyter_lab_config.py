"""JupyterLab's settings for the course, found through JUPYTER_CONFIG_PATH (see the Makefile and README).

The server opens lesson 00, listens on this machine only, keeps its token and asks no other machine anything.
"""

from pathlib import Path

c = get_config()  # noqa: F821 - provided by Jupyter when it reads this file

c.ServerApp.root_dir = str(Path(__file__).resolve().parents[2])
c.LabApp.default_url = "/lab/tree/notebooks/00_start_here.ipynb"
c.ServerApp.ip = "127.0.0.1"
c.KernelManager.transport_encryption = "auto"
c.LabApp.news_url = None
c.LabApp.check_for_updates_class = "jupyterlab.NeverCheckForUpdate"
c.LabApp.extension_manager = "readonly"
c.ServerApp.log_level = "WARN"  # the address is printed all the same
c.ServerApp.tornado_settings = {"ws_ping_timeout": 30_000}  # ms; Jupyter warns about its own 90,000
