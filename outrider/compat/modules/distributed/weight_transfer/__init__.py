"""outrider.distributed.weight_transfer: functions that trainers import and do not call here."""

from outrider.compat.weight_transfer import refuse_name


def __getattr__(name: str) -> object:
    refuse_name(__name__, name)
