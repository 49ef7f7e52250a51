"""One module a subcommand of `convoy`, loaded when it is called: `main(options) -> exit status`."""
