"""Stands for `vllm.v1.metrics.reader`: types of the metrics that LLM.get_metrics returns."""

from outrider.compat.metrics import CounterMetric as Counter
from outrider.compat.metrics import GaugeMetric as Gauge
from outrider.compat.metrics import HistogramMetric as Histogram
from outrider.compat.metrics import Metric
from outrider.compat.metrics import VectorMetric as Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
