//! Every endpoint of the identifiers' interface, with its defaults, bounds, fields and errors.

use serde_json::{Value, json};

use crate::support::{API_KEY, Deployment};

/// The members of an object, in their order.
fn fields(value: &Value) -> Vec<&str> {
    value.as_object().unwrap_or_else(|| panic!("no object: {value}")).keys().map(String::as_str).collect()
}

#[tokio::test]
async fn every_endpoint_answers_in_its_shape() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let admin = server.http().admin();

    assert_eq!(admin.get("/v1/auth/verify").await.json(), json!({"code": 0, "message": "success"}));

    let settings = json!({"key": "orders", "name": "Orders", "base": 1000});
    let made = admin.configure("increment", settings).await;
    let expected = [
        "key",
        "name",
        "base",
        "current",
        "delta",
        "max_request_delta",
        "rand_delta",
        "mode",
        "max",
        "created_at",
        "updated_at",
    ];
    assert_eq!(fields(&made), expected);
    let read = admin.data("/v1/config/increment?key=orders").await;
    assert_eq!(read, made);
    assert_eq!((&read["base"], &read["current"], &read["delta"]), (&json!(1000), &json!(1000), &json!(1)));
    assert_eq!(
        (&read["max_request_delta"], &read["rand_delta"], &read["mode"]),
        (&json!(100), &json!(false), &json!("range"))
    );
    assert_eq!(admin.data("/v1/id/increment?key=orders&size=3").await, json!({"id": [1001, 1002, 1003]}));

    let parts = json!([
        {"type": "fixed-chars", "value": "INV"},
        {"type": "date-format", "format": "yyyy"},
        {"type": "fixed-chars", "value": "-"},
        {"type": "auto-increment", "length": 4, "reset_scope": "year"},
    ]);
    let made = admin.configure("formatted", json!({"key": "invoices", "parts": parts})).await;
    assert_eq!(fields(&made), ["key", "name", "parts", "mode", "sample_id", "uniqueness", "created_at", "updated_at"]);
    let read = admin.data("/v1/config/formatted?key=invoices").await;
    assert_eq!(read, made);
    assert_eq!(read["parts"][0], json!({"type": "fixed-chars", "value": "INV"}));
    let sample = read["sample_id"].as_str().unwrap().to_owned();
    assert!(sample.starts_with("INV20") && sample.ends_with("-0001"), "{sample}");
    let two = admin.data("/v1/id/formatted?key=invoices&size=2").await;
    assert_eq!(two["id"][0], json!(sample), "a sample spends nothing");
    assert!(two["id"][1].as_str().unwrap().ends_with("-0002"), "{two}");

    let layout =
        json!({"key": "events", "base_ts": 1_673_606_841_000_i64, "ts_size": 41, "worker_id_size": 10, "seq_size": 12});
    let made = admin.configure("snowflake", layout).await;
    let expected = [
        "key",
        "name",
        "skip_size",
        "base_ts",
        "ts_size",
        "worker_id_size",
        "seq_size",
        "active_workers",
        "expires_on",
        "created_at",
        "updated_at",
    ];
    assert_eq!(fields(&made), expected);
    assert_eq!((&made["skip_size"], &made["expires_on"]), (&json!(1), &json!("2092-09-19T02:34:56.551Z")));
    let lease = admin.data("/v1/id/snowflake?key=events").await;
    let expected = [
        "skip_size",
        "base_ts",
        "ts_size",
        "worker_id",
        "worker_id_size",
        "seq_size",
        "owner",
        "epoch",
        "not_before",
        "expires_at",
    ];
    assert_eq!(fields(&lease), expected);
    assert_eq!((&lease["worker_id"], &lease["worker_id_size"]), (&json!(0), &json!(10)));
    assert_eq!(admin.data("/v1/config/snowflake?key=events").await["active_workers"], 1);

    let token = admin.data("/v1/auth/token?key=orders").await;
    assert_eq!(fields(&token), ["key", "token", "expires_at"]);
    let reset = admin.data("/v1/auth/tokenreset?key=orders").await;
    assert_eq!(fields(&reset), ["key", "token", "expires_at"]);

    for key in ["ord-1", "ord-2", "ord-3"] {
        admin.make_key(key, 0).await;
    }
    let page = admin.data("/v1/config/list?key=ord&size=2").await;
    let item = |key: &str, id_type: &str| json!({"key": key, "id_type": id_type});
    let first = json!({
        "items": [item("ord-1", "increment"), item("ord-2", "increment")], "next_cursor": "ord-2", "has_more": true
    });
    assert_eq!(page, first);
    let page = admin.data("/v1/config/list?key=ord&size=2&from=ord-2").await;
    let last = json!({
        "items": [item("ord-3", "increment"), item("orders", "increment")], "next_cursor": null, "has_more": false
    });
    assert_eq!(page, last);
    let all = admin.data("/v1/config/list").await;
    assert_eq!(all["items"][0], item("events", "snowflake"));
    assert_eq!(all["items"][1], item("invoices", "formatted"));
    assert_eq!(admin.data("/v1/config/list?key=none").await["items"], json!([]));

    // What takes ids is asked by POST as well, with parameters in the query or the body.
    for path in ["increment", "formatted", "snowflake", "snowflake/next"] {
        let key = match path {
            "increment" => "orders",
            "formatted" => "invoices",
            _ => "events",
        };
        for (query, body) in [(format!("?key={key}"), json!({})), (String::new(), json!({"key": key}))] {
            let answer = admin.post(&format!("/v1/id/{path}{query}"), body).await;
            assert_eq!(answer.status, 200, "{path}{query}: {}", answer.text);
            assert_eq!(answer.headers["cache-control"], "no-store");
        }
    }
    server.stop().await;
}

#[tokio::test]
async fn every_error_has_its_code() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let (admin, key) = (server.http().admin(), server.http().key(API_KEY));
    admin.make_key("inc", 0).await;
    let random = json!([{"type": "fixed-random-chars", "chars_scope": "0123456789abcdef", "length": 16}]);
    admin.configure("formatted", json!({"key": "fmt", "parts": random})).await;
    let layout = json!({"key": "snow", "base_ts": 0, "ts_size": 41, "worker_id_size": 10, "seq_size": 12});
    admin.configure("snowflake", layout).await;

    let long = "k".repeat(256);
    for (path, status, code, mentions) in [
        ("/v1/id/increment?key=nope", 404, 3001, "nope"),
        ("/v1/id/formatted?key=nope", 404, 3001, "nope"),
        ("/v1/id/snowflake?key=nope", 404, 3001, "nope"),
        ("/v1/id/snowflake/next?key=nope", 404, 3001, "nope"),
        ("/v1/config/increment?key=nope", 404, 3001, "nope"),
        ("/v1/config/formatted?key=nope", 404, 3001, "nope"),
        ("/v1/config/snowflake?key=nope", 404, 3001, "nope"),
        ("/v1/auth/token?key=nope", 404, 3001, "nope"),
        ("/v1/auth/tokenreset?key=nope", 404, 3001, "nope"),
        ("/v1/id/increment?key=fmt", 404, 3001, "of the type formatted"),
        ("/v1/id/formatted?key=snow", 404, 3001, "of the type snowflake"),
        ("/v1/id/snowflake?key=inc", 404, 3001, "of the type increment"),
        ("/v1/config/increment?key=fmt", 404, 3001, "of the type formatted"),
        ("/v1/id/increment?key=a%20b", 400, 1002, "invalid key format"),
        ("/v1/id/formatted?key=a.b", 400, 1002, "invalid key format"),
        ("/v1/auth/token?key=%2A", 400, 1002, "invalid key format"),
        (&format!("/v1/config/snowflake?key={long}"), 400, 1002, "invalid key format"),
        ("/v1/id/increment", 400, 1001, "key"),
        ("/v1/id/increment?key=inc&size=0", 400, 1003, "size"),
        ("/v1/id/increment?key=inc&size=-1", 400, 1003, "size"),
        ("/v1/id/increment?key=inc&size=1001", 400, 1003, "size"),
        ("/v1/id/formatted?key=fmt&size=1001", 400, 1003, "size"),
        ("/v1/id/snowflake/next?key=snow&size=0", 400, 1003, "size"),
        ("/v1/config/list?size=0", 400, 1003, "size"),
        ("/v1/config/list?size=101", 400, 1003, "size"),
        ("/v1/id/increment?key=inc&delta=0", 400, 1004, "delta"),
        ("/v1/id/increment?key=inc&delta=-5", 400, 1004, "delta"),
        ("/v1/id/increment?key=inc&delta=101", 400, 1004, "delta"),
        ("/v1/id/increment?key=inc&delta=much", 400, 1001, "delta"),
        ("/v1/id/increment?key=inc&rand_delta=maybe", 400, 1001, "rand_delta"),
        ("/v1/id/increment?key=inc&colour=red", 400, 1001, "colour"),
        ("/v1/id/given?key=inc&number=5", 404, 3001, "5 was not given"),
        ("/v1/id/given?key=inc", 400, 1001, "number"),
        ("/v1/id/given?key=snow&number=5", 400, 1001, "no counter"),
        ("/v1/id/given?key=fmt&number=5", 400, 1001, "no counter"),
    ] {
        let answer = admin.get(path).await;
        assert_eq!((answer.status, &answer.json()["code"]), (status, &json!(code)), "{path}: {}", answer.text);
        assert!(answer.json()["message"].as_str().unwrap().contains(mentions), "{path}: {}", answer.text);
        assert_eq!(answer.json()["data"], json!(null));
    }

    let snow = |change: Value| {
        let mut body = json!({"key": "s", "base_ts": 0, "ts_size": 41, "worker_id_size": 10, "seq_size": 12});
        body.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        ("snowflake", body)
    };
    for ((id_type, body), code, mentions) in [
        (("increment", json!({"key": "i"})), 1001, "base"),
        (("increment", json!({"key": "i", "base": "x"})), 1001, "base"),
        (("increment", json!({"key": "i", "base": -1})), 1001, "base"),
        (("increment", json!({"base": 1})), 1001, "key"),
        (("increment", json!({"key": "i", "base": 0, "dleta": 2})), 1001, "dleta"),
        (("increment", json!({"key": "i", "base": 0, "delta": 0})), 1004, "delta"),
        (("increment", json!({"key": "i", "base": 0, "delta": 101})), 1004, "delta"),
        (("increment", json!({"key": "i", "base": 0, "max_request_delta": 0})), 1001, "max_request_delta"),
        (("increment", json!({"key": "i", "base": 10, "max": 10})), 1001, "max"),
        (("increment", json!({"key": "i", "base": 0, "mode": "fast"})), 1001, "mode"),
        (("increment", json!({"key": "i", "base": 0, "name": "n".repeat(256)})), 1001, "name"),
        (("increment", json!({"key": "fmt", "base": 0})), 1001, "taken by a key of the type formatted"),
        (("formatted", json!({"key": "inc", "parts": random})), 1001, "taken by a key of the type increment"),
        (snow(json!({"key": "inc"})), 1001, "taken by a key of the type increment"),
        (snow(json!({"ts_size": 40})), 1001, "must be 64, is 63"),
        (snow(json!({"ts_size": 300})), 1001, "ts_size"),
        (snow(json!({"base_ts": 9_999_999_999_999_i64})), 1001, "base_ts"),
        (snow(json!({"base_ts": null})), 1001, "base_ts"),
    ] {
        let refused = admin.post(&format!("/v1/config/{id_type}"), body.clone()).await;
        assert_eq!((refused.status, &refused.json()["code"]), (400, &json!(code)), "{body}: {}", refused.text);
        assert!(refused.json()["message"].as_str().unwrap().contains(mentions), "{body}: {}", refused.text);
    }
    assert_eq!(admin.data("/v1/config/list").await["items"].as_array().unwrap().len(), 3, "nothing was half made");
    assert_eq!(key.data("/v1/id/increment?key=inc").await["id"], json!([1]), "nothing was spent");

    // Storage that is away is 4002; see recovery.rs. The end of the numbers is 4003; see increment.rs and formatted.rs.
    server.stop().await;
}

#[tokio::test]
async fn the_same_operations_are_there_over_nats() {
    let deployment = Deployment::new().await;
    let server = deployment.serve().await;
    let nats = deployment.nats().await;
    let ask = async |subject: &str, body: Value| -> Value {
        let reply = nats.request(subject.to_owned(), body.to_string().into()).await.unwrap();
        assert!(reply.headers.is_none(), "{subject}: {reply:?}");
        serde_json::from_slice(&reply.payload).unwrap()
    };
    let made = ask("tm.id.config.set-increment.k", json!({"base": 5, "mode": "strict"})).await;
    assert_eq!((&made["key"], &made["current"]), (&json!("k"), &json!(5)));
    assert_eq!(ask("tm.id.increment.k", json!({"delta": 2, "size": 2})).await, json!({"id": [7, 9]}));
    assert_eq!(ask("tm.id.config.get-increment.k", json!({})).await["current"], 9);
    let parts = json!([{"type": "auto-increment"}]);
    ask("tm.id.config.set-formatted.f", json!({"parts": parts})).await;
    assert_eq!(ask("tm.id.formatted.f", json!({})).await, json!({"id": ["1"]}));
    assert_eq!(ask("tm.id.config.get-formatted.f", json!({})).await["uniqueness"], "counter: no id repeats");
    let layout = json!({"base_ts": 0, "ts_size": 41, "worker_id_size": 10, "seq_size": 12});
    ask("tm.id.config.set-snowflake.s", layout).await;
    let lease = ask("tm.id.snowflake.lease.s", json!({"owner": "me"})).await;
    let renewed = ask("tm.id.snowflake.renew.s", json!({"owner": "me", "epoch": lease["epoch"]})).await;
    assert_eq!(renewed["worker_id"], lease["worker_id"]);
    let released = ask("tm.id.snowflake.release.s", json!({"owner": "me", "epoch": lease["epoch"]})).await;
    assert_eq!(released, json!({"released": true}));
    let strings = ask("tm.id.snowflake.next.s", json!({"size": 2, "strings": true})).await;
    assert!(strings["id"][1].as_str().unwrap().parse::<u64>().unwrap() > 1 << 53, "{strings}");
    assert_eq!(ask("tm.id.config.get-snowflake.s", json!({})).await["active_workers"], 1, "the instance's own");
    assert_eq!(ask("tm.id.config.list", json!({"size": 1})).await["next_cursor"], "f");
    let token = ask("tm.id.token.get.k", json!({})).await;
    assert_ne!(ask("tm.id.token.reset.k", json!({})).await["token"], token["token"]);
    assert_eq!(ask("tm.id.token.verify", json!({})).await, json!({}));
    assert_eq!(ask("tm.id.given.k", json!({"number": 8})).await["last"], 9);
    server.stop().await;
}
