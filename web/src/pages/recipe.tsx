import type { JSX } from 'preact'

import type { RunDetail } from '../data/api'
import { number, setting, words } from '../data/words'
import { Untrusted } from '../parts/text'

/** What a run was made of: its recipe, its engines, the versions of packages, the machine. */
export function Recipe({ run }: { run: RunDetail }): JSX.Element {
  return (
    <>
      <h2>Recipe</h2>
      <p class="quiet">
        <Untrusted text={run.path} />
      </p>
      <Untrusted block text={run.recipe} />
      <h2>Engines</h2>
      <div class="scroll" tabIndex={0} role="region" aria-label="Engines">
        <table>
          <thead>
            <tr>
              {['Engine', 'Kind', 'Machine', 'Version', 'Joined at step', 'Left at step', 'Reason'].map((title) => (
                <th scope="col" key={title}>
                  {title}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {run.engines_list.map((engine) => (
              <tr key={engine.name}>
                <th scope="row">
                  <Untrusted text={engine.name} />
                </th>
                <td>{engine.kind}</td>
                <td>
                  <Untrusted text={engine.host} />
                </td>
                <td>{number(engine.version)}</td>
                <td>{number(engine.joined_step)}</td>
                <td>{number(engine.left_step)}</td>
                <td>
                  <Untrusted text={engine.reason} />
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <Facts title="Versions" facts={run.versions} />
      <Facts title="Machine" facts={run.machine} />
    </>
  )
}

function Facts({ title, facts }: { title: string; facts: Record<string, unknown> | null }): JSX.Element | null {
  if (!facts) return null
  return (
    <>
      <h2>{title}</h2>
      <dl class="settings">
        {Object.entries(facts).map(([name, value]) => (
          <div key={name}>
            <dt>{words(name)}</dt>
            <dd>
              <Untrusted text={setting(value)} />
            </dd>
          </div>
        ))}
      </dl>
    </>
  )
}
