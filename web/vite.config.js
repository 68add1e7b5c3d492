import { createHash } from 'node:crypto'
import { existsSync, readdirSync, readFileSync } from 'node:fs'
import { join } from 'node:path'
import { defineConfig } from 'vite'

const ROOT = import.meta.dirname
const SOURCES = ['index.html', 'package-lock.json', 'package.json', 'public', 'src', 'tsconfig.json', 'vite.config.js']

/** The files below a path, relative to this folder, in the order of their names. */
function files(path) {
  const below = join(ROOT, path)
  if (path.includes('.')) return [path]
  return readdirSync(below, { withFileTypes: true }).flatMap((entry) => (entry.isDirectory() ? files(`${path}/${entry.name}`) : [`${path}/${entry.name}`]))
}

/** SHA-256 over `path NUL length NUL bytes` of every source, sorted by path; tests/watch/test_front_end.py computes it too. */
function digest() {
  const hash = createHash('sha256')
  for (const path of SOURCES.flatMap(files).sort()) {
    const bytes = readFileSync(join(ROOT, path))
    hash.update(`${path}\0${bytes.length}\0`).update(bytes)
  }
  return hash.digest('hex')
}

/** Beside the bundle: which sources it was made from, and the licences of the packages that are in it. */
const provenance = {
  name: 'provenance',
  generateBundle(_, bundle) {
    const modules = Object.values(bundle).flatMap((chunk) => (chunk.type === 'chunk' ? Object.keys(chunk.modules) : []))
    const packages = new Set(modules.flatMap((id) => id.match(/.*node_modules\/(?:@[^/]+\/)?[^/]+(?=\/)/) ?? []))
    packages.add(join(ROOT, 'node_modules/uplot'))
    const licences = [...packages].sort().map((folder) => {
      const { name, version, license } = JSON.parse(readFileSync(join(folder, 'package.json'), 'utf8'))
      const file = ['LICENSE', 'LICENSE.md', 'LICENSE.txt'].map((one) => join(folder, one)).find(existsSync)
      return `${name} ${version} (${license})\n\n${file ? readFileSync(file, 'utf8').trim() : 'See its package.'}\n`
    })
    this.emitFile({ type: 'asset', fileName: 'licences.txt', source: licences.join(`\n${'-'.repeat(80)}\n\n`) })
    this.emitFile({ type: 'asset', fileName: 'sources.sha256', source: `${digest()}\n` })
  },
}

// The build is committed and shipped: no source maps, and nothing inlined into the page, whose policy refuses inline code.
export default defineConfig({
  base: '/',
  oxc: { jsx: { runtime: 'automatic', importSource: 'preact' } },
  plugins: [provenance],
  build: {
    outDir: '../packages/report/stretto_report/watch/static',
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    target: 'es2022',
    rolldownOptions: { onwarn: (warning, warn) => warning.code !== 'MODULE_LEVEL_DIRECTIVE' && warn(warning) },
  },
  server: { proxy: { '/api': 'http://127.0.0.1:8123' } },
})
