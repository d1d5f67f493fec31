// The Vercel AI SDK, as its manual writes an agent: `node vercel.mjs URL KEY` prints what each provider says, complete and streamed.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, apiKey] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: url, apiKey });
const compatible = createOpenAICompatible({ name: "agentrl", baseURL: url, apiKey, supportsStructuredOutputs: true });
const messages = createAnthropic({ baseURL: url, apiKey })("any");
const models = { responses: openai("any"), chat: openai.chat("any"), messages, compatible: compatible("any") };
const calculator = tool({
  description: "Computes an arithmetic expression exactly.",
  inputSchema: z.object({ expression: z.string() }),
  execute: async () => "7",
});

globalThis.AI_SDK_LOG_WARNINGS = false;
for (const [name, model] of Object.entries(models)) {
  for (const run of [generateText, streamText]) {
    const asked = { model, tools: { calculator }, stopWhen: stepCountIs(4), prompt: `What is 15 minus 8? (${name}, ${run.name})`, maxRetries: 0 };
    const made = await run(asked);
    console.log(name, (await made.steps).length, await made.text);
  }
  const output = Output.object({ schema: z.object({ value: z.number() }) });
  const made = await generateText({ model, output, prompt: `What is 15 minus 8? (${name}, output)`, maxRetries: 0 });
  console.log(name, made.output.value);
  const asked = { model, tools: { calculator }, toolChoice: "required", prompt: `What is 15 minus 8? (${name}, required)`, maxRetries: 0 };
  console.log(name, (await generateText(asked)).toolResults[0].output);
}
