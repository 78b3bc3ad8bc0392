"""The jobs: each is a module with `main(argv)`, which `python -m train.NAME` runs."""
