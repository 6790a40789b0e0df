"""Where everything should live and what a step will take, before anything is started."""
