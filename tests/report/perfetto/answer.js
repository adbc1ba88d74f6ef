// Answers requests to Perfetto's trace processor (TraceProcessorRpcStream) with its WebAssembly build.
// usage: node answer.js FOLDER < requests > replies; FOLDER has engine_bundle.js, made to run in a browser's worker.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const folder = process.argv[2];
const wasm = fs.readFileSync(path.join(folder, "trace_processor.wasm"));
const silent = () => undefined;

// What the bundle uses of a browser's worker.
const worker = {
  console: { log: silent, warn: silent, error: console.error },
  importScripts: silent,
  location: { href: "engine_bundle.js" },
  performance,
  setTimeout,
  TextDecoder,
  WebAssembly,
  XMLHttpRequest: class {
    open() {}
    send() {
      this.response = wasm;
    }
  },
  // The bundle compares these classes with those of what it is given.
  TypeError,
  Uint8Array,
};
worker.self = worker;
vm.runInNewContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"), worker);

const replies = [];
const port = { postMessage: (data) => replies.push(Buffer.from(data)) };
setImmediate(() => {
  worker.onmessage({ data: { enginePort: port } });
  port.onmessage({ data: new Uint8Array(fs.readFileSync(0)) });
  fs.writeSync(1, Buffer.concat(replies));
});
