//! `tidemark stage`.

use uuid::Uuid;

use crate::support::{Deployment, tidemark};

#[tokio::test]
async fn a_designer_at_the_command_line() {
    let deployment = Deployment::new().await;
    let server = deployment.serve_with(|config| config.stages.first_id = 101).await;
    let stage = async |arguments: &[&str]| {
        let (code, printed, problem) = tidemark(&[&["stage"], arguments].concat(), deployment.environment()).await;
        (code == Some(0), if code == Some(0) { printed } else { problem })
    };
    let prints = async |arguments: &[&str], expected: &str| {
        assert_eq!(stage(arguments).await, (true, expected.to_owned()), "{arguments:?}");
    };
    let id = Uuid::new_v4().to_string();
    prints(&["allocate", "--request-id", &id], "101\n").await;
    prints(&["allocate", "--request-id", &id], "101\n").await;
    prints(&["allocate", "--json"], "{\"stage_id\":102}\n").await;
    prints(&["register", "101", "/Game/Gate"], "{101, 0, 1}\t/Game/Gate\n").await;
    prints(
        &["register", "101", "/Game/Well", "--json"],
        "{\"key\":\"{101, 0, 2}\",\"prop_id\":2,\"path\":\"/Game/Well\"}\n",
    )
    .await;
    prints(&["props", "101"], "{101, 0, 1}\t/Game/Gate\n{101, 0, 2}\t/Game/Well\n").await;
    prints(&["prop", "101", "2"], "{101, 0, 2}\t/Game/Well\n").await;
    prints(&["prop", "101", "/game/gate"], "{101, 0, 1}\t/Game/Gate\n").await;
    let act = |revision| format!("act         {{101, 1, 0}}\nname        War\nrevision    {revision}\n");
    let (one, two) = ("{101, 0, 1} 2\n", "{101, 0, 2} -5\n");
    prints(&["create-act", "101", "--name", "War", "1=2", "2=-5"], &format!("{}{one}{two}", act(1))).await;
    prints(&["update-act", "101", "1", "--revision", "1", "2=-5"], &format!("{}{two}", act(2))).await;
    let (ok, problem) = stage(&["update-act", "101", "1", "--revision", "1"]).await;
    assert!(!ok && problem.contains("is at revision 2, not 1"), "{problem}");
    prints(&["act", "101", "1"], &format!("{}{two}", act(2))).await;
    prints(&["acts", "101"], "{101, 1, 0}\trevision 2\tWar\n").await;
    prints(&["unregister", "101", "2"], "{101, 0, 2}\t/Game/Well\n").await;
    prints(&["resolve", "101", "1"], "{101, 0, 2}\t-5\t/Game/Well\tnot registered any more\n").await;
    let (ok, info) = stage(&["info", "101"]).await;
    assert!(ok && info.contains(&format!("request id  {id}\n")) && info.contains("props       1\n"), "{info}");
    for (arguments, said) in [
        (&["info", "103"][..], "stage 103 was never allocated"),
        (&["allocate", "--request-id", "x"], "--request-id"),
        (&["create-act", "101", "1:2"], "must read PROP=STATE"),
        (&["create-act", "101", "1=1", "1=2"], "prop 1 is given two states"),
        (
            &["create-act", "101", "9=2"],
            "Data Error: Act '{101, 2, 0}' references an unregistered PropID '{101, 0, 9}'.",
        ),
        (&["register", "101", "gate"], "path: must be the path of an object"),
    ] {
        let (ok, problem) = stage(arguments).await;
        assert!(!ok && problem.contains(said), "{arguments:?}: {problem}");
    }
    server.stop().await;
}
