"""``python -m fp8kv_inductor``, which ``torchrun`` can start: the ``fp8kv`` command."""

from fp8kv_inductor.cli import main

raise SystemExit(main())
