//! Who may call what, on both transports.

use std::time::Duration;

use async_nats::ConnectOptions;
use futures::StreamExt;
use serde_json::json;
use tidemark::jetstream::connect_to;
use tokio::sync::mpsc;

use crate::support::{API_KEY, Deployment, UpInstance, eventually};

#[tokio::test]
async fn api_keys_are_made_used_listed_and_revoked() {
    let deployment = Deployment::new().await;
    let (server, other) = tokio::join!(deployment.serve(), deployment.serve());
    let admin = server.http().admin();
    server.http().make_key("k", 0).await;

    let made = admin.post("/v1/admin/keys", json!({"tenant": "acme", "source": "gateway", "roles": ["mint"]})).await;
    assert_eq!(made.status, 201, "{}", made.text);
    let (id, key) = (made.json()["id"].as_str().unwrap().to_owned(), made.json()["key"].as_str().unwrap().to_owned());
    let mint = "/v1/id/increment?key=k";
    assert_eq!(server.http().key(&key).get(mint).await.status, 200, "at once on the instance that made it");
    let bearer = server.http().header("authorization", &format!("bearer {key}"));
    assert_eq!(bearer.get(mint).await.status, 200);
    eventually("the other instance knows the key", async || {
        (other.http().key(&key).get(mint).await.status == 200).then_some(())
    })
    .await;

    let listed = admin.get("/v1/admin/keys").await;
    assert_eq!(listed.json()["keys"][0]["tenant"], "acme");
    assert!(!listed.text.contains(&key) && !listed.text.contains("hash"), "{}", listed.text);
    let stored = deployment.nats().await;
    let stored = async_nats::jetstream::new(stored).get_key_value("tm_registry").await.unwrap();
    let record = stored.get(format!("key.{id}")).await.unwrap().unwrap();
    assert!(!String::from_utf8_lossy(&record).contains(&key), "only the hash is kept");

    assert_eq!(admin.delete(&format!("/v1/admin/keys/{id}")).await.status, 200);
    assert_eq!(server.http().key(&key).get(mint).await.status, 401, "at once on the instance that revoked it");
    eventually("the other instance forgets the key", async || {
        (other.http().key(&key).get(mint).await.status == 401).then_some(())
    })
    .await;
    assert_eq!(admin.delete(&format!("/v1/admin/keys/{id}")).await.status, 404);
    tokio::join!(server.stop(), other.stop());
}

#[tokio::test]
async fn credentials_open_what_they_are_for_and_nothing_else() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let admin = server.http().admin();
    server.http().make_key("k", 0).await;
    let make = async |body| admin.post("/v1/admin/keys", body).await.json()["key"].as_str().unwrap().to_owned();
    let tenant_admin = make(json!({"tenant": "acme", "roles": ["admin", "mint"]})).await;
    let no_mint = make(json!({"tenant": "acme", "roles": ["usage"]})).await;
    let (mint, keys) = ("/v1/id/increment?key=k", "/v1/admin/keys");

    for (credential, path, status) in [
        (API_KEY, mint, 200),
        (API_KEY, keys, 200),
        (tenant_admin.as_str(), mint, 200),
        (tenant_admin.as_str(), keys, 403),
        (no_mint.as_str(), mint, 403),
        ("tmk_unknown_secret", mint, 401),
        (&tenant_admin[..tenant_admin.len() - 1], mint, 401),
        ("", mint, 401),
    ] {
        assert_eq!(server.http().key(credential).get(path).await.status, status, "{credential} {path}");
    }
    let forbidden = server.http().key(&no_mint).get(mint).await;
    assert_eq!(forbidden.json()["code"], 2002);
    assert_eq!(server.http().get(keys).await.status, 401);
    assert_eq!(server.http().header("authorization", "Basic YTpi").get(mint).await.status, 401);

    for (body, mentions) in [
        (json!({"tenant": "acme", "roles": []}), "roles"),
        (json!({"tenant": "acme", "roles": ["king"]}), "roles"),
        (json!({"tenant": "a.b", "roles": ["mint"]}), "tenant"),
        (json!({"roles": ["mint"]}), "tenant"),
        (json!({"tenant": "acme", "user": "", "roles": ["mint"]}), "user"),
    ] {
        let refused = admin.post("/v1/admin/keys", body).await;
        assert!(refused.status == 400 && refused.text.contains(mentions), "{}", refused.text);
    }
    server.stop().await;
}

#[tokio::test]
async fn without_an_admin_token_administration_is_closed() {
    let deployment = Deployment::new().await;
    let server = deployment
        .serve_with(|config| {
            config.auth.admin_token = None;
            config.auth.api_key = None;
        })
        .await;
    assert_eq!(server.http().admin().get("/v1/admin/keys").await.status, 401);
    assert_eq!(server.http().header("authorization", "Bearer ").get("/v1/admin/keys").await.status, 401);
    server.stop().await;
}

#[tokio::test]
async fn up_gives_every_tenant_a_key_with_the_rights_of_a_tenant() {
    let up = UpInstance::shared().await;
    let operator = up.http().key(&up.env["TIDEMARK_API_KEY"]);
    let made = operator.post("/v1/config/increment", json!({"key": "shared", "base": 0})).await;
    assert_eq!(made.status, 200, "{}", made.text);
    for tenant in ["TIDEMARK_API_KEY_ACME", "TIDEMARK_API_KEY_GLO_BEX"] {
        let caller = up.http().key(&up.env[tenant]);
        assert_eq!(caller.get("/v1/id/increment?key=shared").await.status, 200, "{tenant}");
        assert_eq!(caller.get("/v1/admin/keys").await.status, 403, "{tenant}");
        assert_eq!(caller.post("/v1/config/increment", json!({"key": "x", "base": 0})).await.status, 403, "{tenant}");
    }
    let listed = operator.get("/v1/admin/keys").await.json();
    let tenants: Vec<_> =
        listed["keys"].as_array().unwrap().iter().map(|key| key["tenant"].as_str().unwrap()).collect();
    assert!(["default", "acme", "glo-bex"].iter().all(|tenant| tenants.contains(tenant)), "{tenants:?}");
}

/// What the server refuses a connection.
struct Refusals(mpsc::UnboundedReceiver<String>);

impl Refusals {
    async fn next(&mut self) -> String {
        let next = tokio::time::timeout(Duration::from_secs(10), self.0.recv()).await;
        next.expect("a refusal within ten seconds").unwrap()
    }

    /// Publishes, and expects to be refused for just that.
    async fn refuse_to_publish(&mut self, client: &async_nats::Client, subject: &'static str) {
        client.publish(subject, "".into()).await.unwrap();
        let refusal = self.next().await;
        assert!(refusal.contains("Publish") && refusal.contains(subject), "{subject}: {refusal}");
    }

    /// None, after the server has dealt with everything before.
    async fn none(&mut self, client: &async_nats::Client, answered: &'static str) {
        client.request(answered, "".into()).await.unwrap();
        assert_eq!(self.0.try_recv().ok(), None);
    }
}

async fn connect(url: &str, inbox: &str) -> (async_nats::Client, Refusals) {
    let (refusals, refused) = mpsc::unbounded_channel();
    let options = ConnectOptions::new()
        .custom_inbox_prefix(inbox)
        .request_timeout(Some(Duration::from_secs(5)))
        .event_callback(move |event| {
            if let async_nats::Event::ServerError(error) = event {
                let _ = refusals.send(error.to_string());
            }
            std::future::ready(())
        });
    (connect_to(options, url).await.unwrap(), Refusals(refused))
}

#[tokio::test]
async fn nats_permissions_keep_tenants_to_themselves() {
    let up = UpInstance::shared().await;
    let (acme, mut refused) = connect(&up.env["NATS_URL_ACME"], "_INBOX_acme").await;
    let operator = up.http().key(&up.env["TIDEMARK_API_KEY"]);
    operator.post("/v1/config/increment", json!({"key": "nats", "base": 0})).await;

    let ids = acme.request("tm.id.increment.nats", "".into()).await.unwrap();
    assert_eq!(&*ids.payload, br#"{"id":[1]}"#);
    // Stages belong to nobody: who may mint may edit any.
    let request = json!({"request_id": uuid::Uuid::new_v4()}).to_string();
    let stage = acme.request("tm.stage.allocate", request.into()).await.unwrap();
    let stage: serde_json::Value = serde_json::from_slice(&stage.payload).unwrap();
    let prop = json!({"path": "/Game/A"}).to_string();
    let prop = acme.request(format!("tm.stage.prop-register.{}", stage["stage_id"]), prop.into()).await.unwrap();
    assert!(prop.headers.is_none(), "{prop:?}");
    // Timers are the tenant's own.
    let timer = json!({"execute_in": "1h", "callback": {"type": "nats", "topic": "a.b"}}).to_string();
    let timer = acme.request("tm.timer.create.acme", timer.into()).await.unwrap();
    assert!(timer.headers.is_none(), "{timer:?}");
    // So is usage: published, asked for a verdict, and told of what was refused.
    let mut told = acme.subscribe("usage-rejected.acme.*").await.unwrap();
    refused.none(&acme, "tm.id.increment.nats").await;
    acme.publish("usage.acme.gateway", "{}".into()).await.unwrap();
    let rejected = tokio::time::timeout(Duration::from_secs(10), told.next()).await.unwrap().unwrap();
    assert_eq!(rejected.subject.as_str(), "usage-rejected.acme.gateway");
    let units = acme.request("tm.usage.units.acme", "".into()).await.unwrap();
    assert!(units.headers.is_none(), "{units:?}");
    let judged = acme.request("tm.usage.ingest.acme.default", "[{}]".into()).await.unwrap();
    assert!(String::from_utf8_lossy(&judged.payload).contains("validation_error"), "{judged:?}");

    for subject in [
        "usage.glo-bex.gateway",
        "usage.default.gateway",
        "tm.usage.ingest.default.default",
        "tm.usage.ingest.glo-bex.acme",
        "tm.usage.limits-set.default",
        "tm.usage.unit-register",
        "tm.usage.source-register",
        "usage-rejected.acme.gateway",
        "$JS.API.STREAM.PURGE.tm_USAGE",
        "$JS.API.STREAM.INFO.tm_USAGE",
        "tm.id.config.set-increment.nats",
        "tm.admin.key-list",
        "tm.admin.key-create",
        "$KV.tm_counters.increment.nats",
        "$KV.tm_registry.key.x",
        "$JS.API.STREAM.DELETE.KV_tm_counters",
        "$JS.API.STREAM.INFO.KV_tm_counters",
        "$KV.tm_stage_contents.1",
        "tm_stages.allocated",
        "tm.timer.create.default",
        "tm.timer.get-secrets.glo-bex",
        "tm_timers.wake.1",
        "tm_stage_limits.v4-127-0-0-1",
        "orders.new",
    ] {
        refused.refuse_to_publish(&acme, subject).await;
    }
    for subject in
        ["_INBOX.>", "_INBOX_tm.>", "usage.>", "tm.>", "tm.event.timer.glo-bex.>", "usage-rejected.glo-bex.>", ">"]
    {
        let _subscription = acme.subscribe(subject).await.unwrap();
        let refusal = refused.next().await;
        assert!(refusal.contains("Subscription") && refusal.contains(subject), "{subject}: {refusal}");
    }
    for subject in ["tm.event.timer.acme.>", "usage-rejected.acme.>"] {
        let _subscription = acme.subscribe(subject).await.unwrap();
        refused.none(&acme, "tm.id.increment.nats").await;
    }

    // The server acknowledges what a stream takes to whatever reply subject stands in the message.
    let (operator, _) = connect(&up.env["NATS_URL"], "_INBOX").await;
    let jetstream = async_nats::jetstream::new(operator);
    let mut stream = jetstream.get_stream("tm_USAGE").await.unwrap();
    let before = stream.info().await.unwrap().state.last_sequence;
    acme.publish_with_reply("usage.acme.gateway", "$KV.tm_counters.increment.nats", "{}".into()).await.unwrap();
    acme.publish_with_reply("tm.id.increment.nats", "$KV.tm_counters.increment.nats", "".into()).await.unwrap();
    let stored = acme.request("usage.acme.gateway", "{}".into()).await.unwrap();
    assert!(String::from_utf8_lossy(&stored.payload).contains("tm_USAGE"), "{stored:?}");
    assert_eq!(stream.info().await.unwrap().state.last_sequence, before + 2);
    let counters = connect(&up.service_env()["NATS_URL"], "_INBOX_tm_test").await.0;
    let counters = async_nats::jetstream::new(counters).get_key_value("tm_counters").await.unwrap();
    let mark = counters.get("increment.nats").await.unwrap().unwrap();
    assert!(!String::from_utf8_lossy(&mark).contains("tm_USAGE"), "an acknowledgement was written over a counter");

    let anonymous = format!("nats://127.0.0.1:{}", up.env["NATS_URL"].rsplit(':').next().unwrap());
    assert!(async_nats::connect(&anonymous).await.is_err(), "nobody gets in without a name");
}

#[tokio::test]
async fn the_operator_looks_at_everything_and_harms_nothing() {
    let up = UpInstance::shared().await;
    let (operator, mut refused) = connect(&up.env["NATS_URL"], "_INBOX").await;
    let keys = operator.request("tm.admin.key-list", "".into()).await.unwrap();
    assert!(keys.headers.is_none(), "{keys:?}");
    let services = operator.request("$SRV.PING.tm-id", "".into()).await.unwrap();
    assert!(String::from_utf8_lossy(&services.payload).contains("tm-id"));
    let info = operator.request("$JS.API.STREAM.INFO.KV_tm_counters", "".into()).await.unwrap();
    assert!(String::from_utf8_lossy(&info.payload).contains("KV_tm_counters"));

    // Streams and buckets of its own.
    let jetstream = async_nats::jetstream::new(operator.clone());
    let bucket = jetstream
        .create_key_value(async_nats::jetstream::kv::Config { bucket: "mine".into(), ..Default::default() })
        .await
        .unwrap();
    bucket.put("a", "b".into()).await.unwrap();
    let mut spy = operator.subscribe("tm.id.increment.>").await.unwrap();
    operator.publish("tm.id.increment.spied", "".into()).await.unwrap();
    assert!(spy.next().await.is_some());
    refused.none(&operator, "tm.admin.key-list").await;

    for subject in [
        "$KV.tm_counters.increment.x",
        "$KV.tm_registry.key.x",
        "$JS.API.STREAM.DELETE.KV_tm_counters",
        "$JS.API.STREAM.PURGE.KV_tm_counters",
        "$JS.API.STREAM.UPDATE.KV_tm_registry",
        "$JS.API.STREAM.MSG.DELETE.KV_tm_counters",
        "$JS.API.CONSUMER.CREATE.KV_tm_registry.c.x",
        "$JS.API.DIRECT.GET.KV_tm_registry.$KV.tm_registry.key.x",
        "$JS.API.STREAM.PURGE.tm_STAGES",
        "$KV.tm_stage_contents.1",
        "tm_stages.allocated",
        "tm_stage_limits.v4-127-0-0-1",
        "usage.acme.gateway",
    ] {
        refused.refuse_to_publish(&operator, subject).await;
    }
    let _inbox = operator.subscribe("_INBOX_tm.>").await.unwrap();
    assert!(refused.next().await.contains("Subscription"));
}
