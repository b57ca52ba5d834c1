// llama.cpp through node-llama-cpp, for bench/cpu.py: a line of JSON with a prompt's tokens in, a line with the greedy
// answer, its seconds and its CPU time out.
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const [packages, path, threads] = process.argv.slice(2);
const {getLlama} = await import(pathToFileURL(`${packages}/node-llama-cpp/dist/index.js`));
const llama = await getLlama({gpu: false, build: "never", logLevel: "error", maxThreads: Number(threads)});
const model = await llama.loadModel({modelPath: path});
const context = await model.createContext({contextSize: 1024, batchSize: 512, threads: Number(threads)});
const sequence = context.getSequence();
for await (const line of createInterface({input: process.stdin})) {
    const {tokens, count} = JSON.parse(line);
    await sequence.clearHistory();
    const answer = [];
    const began = performance.now();
    const before = process.cpuUsage();
    for await (const token of sequence.evaluate(tokens, {temperature: 0, yieldEogToken: true})) {
        answer.push(token);
        if (answer.length >= count) break;
    }
    const {user, system} = process.cpuUsage(before);
    console.log(JSON.stringify({answer, wall: (performance.now() - began) / 1e3, cpu: (user + system) / 1e6}));
}
process.exit(0);
