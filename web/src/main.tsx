import { render } from 'preact'
import type { JSX } from 'preact'

import { useRoute } from './data/route'
import { applyTheme } from './data/theme'
import { DiffPage } from './pages/diff'
import { Run } from './pages/run'
import { Runs } from './pages/runs'
import { Frame } from './parts/frame'
import './style.css'

function Page(): JSX.Element {
  const route = useRoute()
  const [first, second] = route.parts
  const run = first === 'runs' ? second : undefined
  return (
    <Frame run={run}>
      {run !== undefined ? <Run key={run} route={route} /> : first === undefined || first === 'runs' ? <Runs route={route} /> : first === 'diff' ? <DiffPage route={route} /> : <p role="alert">There is no such page.</p>}
    </Frame>
  )
}

// The token has done its work when the page is here: it stays neither in the address nor in the history.
window.history.replaceState(null, '', window.location.pathname + window.location.hash)
applyTheme()
const place = document.getElementById('app')
if (place) render(<Page />, place)
