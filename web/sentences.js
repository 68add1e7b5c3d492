// Writes src/data/sentences.json: what each curve means, out of the tables of docs/reference/metrics.md. `make web` runs it before the build.
import { readFileSync, writeFileSync } from 'node:fs'

const TABLES = [
  ['## A training step', ''],
  ['## An update', 'trainer.'],
  ['## An evaluation', 'evaluation.'],
]
/** Fields that are no curves: the pages would carry their sentences in vain. */
const NO_CURVE = /^(step|version|skipped|trainer|goodput|selection_bias|slower_than_generation|evaluation\.(?!accuracy$).*)$/
const page = readFileSync(new URL('../docs/reference/metrics.md', import.meta.url), 'utf8')
const sentences = {}
for (const [heading, prefix] of TABLES) {
  const section = page.split('\n## ').find((part) => `## ${part}`.startsWith(heading))
  if (section === undefined) throw new Error(`docs/reference/metrics.md has no section "${heading}"`)
  for (const line of section.split('\n')) {
    const cells = line.match(/^\| `([^|]*)` \| (.*) \| ([^|]*)\|$/)
    if (cells && !NO_CURVE.test(prefix + cells[1])) sentences[prefix + cells[1]] = { sentence: cells[2].trim(), unit: cells[3].trim() }
  }
}
writeFileSync(new URL('src/data/sentences.json', import.meta.url), `${JSON.stringify(sentences, null, 1)}\n`)
