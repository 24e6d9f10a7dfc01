"""JupyterLab's settings for the course, found through JUPYTER_CONFIG_PATH (see the Makefile and README).

The server listens on this machine only, keeps its token, and asks no other machine for anything.
"""

c = get_config()  # noqa: F821 - provided by Jupyter when it reads this file

c.ServerApp.ip = "127.0.0.1"
c.LabApp.news_url = None
c.LabApp.check_for_updates_class = "jupyterlab.NeverCheckForUpdate"
c.LabApp.extension_manager = "readonly"
c.KernelManager.transport_encryption = "auto"
