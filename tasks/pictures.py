"""The pictures of reports, plans and benchmarks: SVG text that needs neither network nor scripts."""

from ebbflow.tasks.charts import bars_svg, cdf_svg, lines_svg
from ebbflow.tasks.dag import dag_svg
from ebbflow.tasks.timeline import timeline_svg

__all__ = ["bars_svg", "cdf_svg", "dag_svg", "lines_svg", "timeline_svg"]
