"""The jobs, a module each with `main(argv)`: `python -m train.NAME` and `specjax train NAME` run them."""
