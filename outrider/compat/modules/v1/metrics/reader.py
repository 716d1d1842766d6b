"""outrider.v1.metrics.reader: the metrics of LLM.get_metrics, at vLLM's place."""

from outrider.compat.metrics import CounterMetric as Counter
from outrider.compat.metrics import GaugeMetric as Gauge
from outrider.compat.metrics import HistogramMetric as Histogram
from outrider.compat.metrics import Metric
from outrider.compat.metrics import VectorMetric as Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
