//! `tidemark bench` on a small setting, and the documentation that comes from the declarations.

use std::{collections::HashMap, path::Path};

use serde_json::Value;

use crate::support::tidemark;

#[tokio::test]
async fn figures_are_shown_and_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (json, page, plots) = (path("figures.json"), path("performance.md"), path("plots"));
    let arguments =
        ["bench", "--only", "usage, published", "--rounds", "1", "--json", &json, "--markdown", &page, "--svg", &plots];
    let (code, out, err) = tidemark(&arguments, HashMap::new()).await;
    let figures: Value = serde_json::from_str(&std::fs::read_to_string(&json).expect(&err)).unwrap();
    let [row] = figures["rows"].as_array().unwrap().as_slice() else { panic!("{figures}") };
    assert_eq!((&row["name"], &row["unit"]), (&"usage, published to committed".into(), &"ratio".into()));
    let (goal, figure) = (row["goal"].as_f64().unwrap(), row["figure"].as_f64().unwrap());
    assert!(goal == 0.5 && figure > 0.0, "{row}");
    // Whoever misses a goal says so with his exit code. How fast this machine is decides nothing here.
    assert_eq!(row["ok"], figure >= goal);
    assert_eq!(code, Some(if figure >= goal { 0 } else { 1 }), "{out}{err}");
    assert!(out.contains("usage, published to committed\t") && out.lines().count() == 1, "{out}");
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("| usage, published to committed | at least 0.50 |"), "{page}");
    assert!(page.contains("nats-server 2.") && page.contains("cores"), "{page}");
    let plot = std::fs::read_to_string(Path::new(&plots).join("usage-published-to-committed.svg")).unwrap();
    assert!(plot.contains("bare inserts") && page.contains("plots/usage-published-to-committed.svg"), "{plot}");

    let (code, _, err) = tidemark(&["bench", "--only", "nothing of the kind"], HashMap::new()).await;
    assert!(code == Some(1) && err.contains("no row has that in its name"), "{err}");
}

#[tokio::test]
async fn the_documentation_has_every_operation() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    let (code, out, err) = tidemark(&["docs", docs.to_str().unwrap(), "--check"], HashMap::new()).await;
    assert_eq!(code, Some(0), "{out}{err}");
    // Links between the pages lead somewhere.
    for page in pages(&docs) {
        let text = std::fs::read_to_string(&page).unwrap();
        for target in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let path = target.split('#').next().unwrap();
            let elsewhere = path.is_empty() || path.contains("://");
            assert!(elsewhere || page.parent().unwrap().join(path).exists(), "{}: {target}", page.display());
        }
    }
}

fn pages(folder: &Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().flatten().map(|entry| entry.path());
    let (folders, files): (Vec<_>, Vec<_>) = entries.partition(|path| path.is_dir());
    let inside = folders.iter().flat_map(|folder| pages(folder));
    files.into_iter().filter(|file| file.extension().is_some_and(|kind| kind == "md")).chain(inside).collect()
}
