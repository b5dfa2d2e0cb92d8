//! Curves as SVG files.

use std::fmt::Write;

/// Lines over the same axes.
#[derive(Debug, Clone)]
pub struct Plot {
    pub title: &'static str,
    pub x: &'static str,
    pub y: &'static str,
    pub lines: Vec<Line>,
}

#[derive(Debug, Clone)]
pub struct Line {
    pub name: &'static str,
    pub points: Vec<(f64, f64)>,
}

const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 80.0;
const RIGHT: f64 = 30.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 60.0;
const TICKS: usize = 5;
const COLOURS: [&str; 4] = ["#3b6ea5", "#c8553d", "#4c956c", "#8a6fb0"];

impl Plot {
    /// How large each share of the values is: the share on the one axis, the value on the other.
    pub fn of_latencies(title: &'static str, latencies: &[(&'static str, &[f64])]) -> Self {
        let line = |(name, sorted): &(&'static str, &[f64])| Line { name, points: shares(sorted) };
        Self { title, x: "% of all", y: "ms", lines: latencies.iter().map(line).collect() }
    }

    pub fn svg(&self) -> String {
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let right = points().map(|point| point.0).fold(f64::EPSILON, f64::max);
        let top = points().map(|point| point.1).fold(f64::EPSILON, f64::max);
        let at = |(x, y): (f64, f64)| {
            let (wide, high) = (WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM);
            (LEFT + x / right * wide, HEIGHT - BOTTOM - y / top * high)
        };
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" font-family=\"sans-serif\" \
             font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
             <text x=\"{LEFT}\" y=\"24\" font-size=\"15\">{}</text>\n",
            self.title
        );
        for tick in 0..=TICKS {
            let share = tick as f64 / TICKS as f64;
            let ((x, _), (_, y)) = (at((right * share, 0.0)), at((0.0, top * share)));
            let (end, below) = (WIDTH - RIGHT, HEIGHT - BOTTOM + 18.0);
            let _ = writeln!(
                svg,
                "<line x1=\"{LEFT}\" x2=\"{end}\" y1=\"{y:.1}\" y2=\"{y:.1}\" stroke=\"#ddd\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\
                 <text x=\"{x:.1}\" y=\"{below}\" text-anchor=\"middle\">{}</text>",
                LEFT - 8.0,
                y + 4.0,
                short(top * share),
                short(right * share)
            );
        }
        for (index, line) in self.lines.iter().enumerate() {
            let colour = COLOURS[index % COLOURS.len()];
            let path: Vec<String> = line
                .points
                .iter()
                .map(|point| {
                    let (x, y) = at(*point);
                    format!("{x:.1},{y:.1}")
                })
                .collect();
            let across = LEFT + 10.0 + index as f64 * 200.0;
            let _ = writeln!(
                svg,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>\
                 <text x=\"{across}\" y=\"42\" fill=\"{colour}\">{}</text>",
                path.join(" "),
                line.name
            );
        }
        let _ = writeln!(
            svg,
            "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{}</text><text x=\"10\" y=\"42\">{}</text></svg>",
            WIDTH - RIGHT,
            HEIGHT - 15.0,
            self.x,
            self.y
        );
        svg
    }
}

/// A hundred points of sorted values, and the end more closely: that is where it gets interesting.
fn shares(sorted: &[f64]) -> Vec<(f64, f64)> {
    let percents = (0..99).map(f64::from).chain((0..=10).map(|tenth| 99.0 + f64::from(tenth) / 10.0));
    let at = |percent: f64| sorted[((sorted.len() - 1) as f64 * percent / 100.0) as usize];
    percents.map(|percent| (percent, at(percent))).collect()
}

fn short(value: f64) -> String {
    match value {
        0.0 => "0".to_owned(),
        1e6.. => format!("{:.1} M", value / 1e6),
        1e4.. => format!("{:.0} k", value / 1e3),
        10.0.. => format!("{value:.0}"),
        _ => format!("{value:.1}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_ends_at_the_largest_value() {
        let late: Vec<f64> = (1..=1000).map(f64::from).collect();
        let plot = Plot::of_latencies("late", &[("all", &late)]);
        assert_eq!(plot.lines[0].points.last(), Some(&(100.0, 1000.0)));
        let svg = plot.svg();
        assert!(svg.starts_with("<svg") && svg.contains("830.0,50.0") && svg.ends_with("</svg>\n"), "{svg}");
    }
}
