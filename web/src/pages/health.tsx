import type { JSX } from 'preact'
import { useEffect } from 'preact/hooks'

import { type AskedPrompt, type Health, runPath } from '../data/api'
import { useJson } from '../data/hooks'
import { kind } from '../data/palette'
import { to } from '../data/route'
import { changed } from '../data/where'
import { duration, number, percent, words } from '../data/words'
import { Curve } from '../parts/chart'
import { Bar, Fault, Tip } from '../parts/frame'
import { Untrusted } from '../parts/text'
import type { Live } from './run'

/** Whether the data is worth training on: where generated work went, what was chosen of it, what no one solves. */
export function HealthPage({ live }: { live: Live }): JSX.Element {
  const { value, fault, again } = useJson<Health>(`${runPath(live.run.id)}/health`)
  useEffect(() => {
    if (live.run.step > 0) again()
  }, [Math.floor(live.run.step / 10)])
  return (
    <>
      <h2>Data health</h2>
      <Fault fault={fault} value={value} />
      {value && <Found run={live.run.id} health={value} />}
    </>
  )
}

function Found({ run, health }: { run: string; health: Health }): JSX.Element {
  const { prompts } = health
  return (
    <>
      {health.indexed < 1 && <p role="status">{Math.floor(100 * health.indexed)} % of the run is read so far.</p>}
      <Goodput health={health} />
      <Canary run={run} health={health} />
      <Bias health={health} />
      <Truncation run={run} health={health} />
      <RewardByLength health={health} />
      <h3>Prompts</h3>
      <dl class="facts">
        <Tip label="asked" value={number(prompts.asked)} />
        <Tip label="never solved" value={number(prompts.never_solved)} />
        <Tip label="always solved" value={number(prompts.always_solved)} />
        <Tip label="sometimes solved" value={number(prompts.sometimes)} />
      </dl>
      <div class="siblings">
        <Prompts run={run} title="Never solved" prompts={prompts.never} />
        <Prompts run={run} title="Always solved" prompts={prompts.always} />
      </div>
      <Reasons run={run} title="Undecided verdicts" none="No completion is without a verdict." reasons={health.undecided} />
      <Reasons run={run} title="Why trajectories ended untrained" none="None did." reasons={health.reasons} />
      <Duplicates health={health} />
    </>
  )
}

interface Part {
  name: string
  tokens: number | null
  seconds: number | null
}

/** The parts of the budget that are on record: each has its tokens, or its seconds. */
function partsOf(goodput: Record<string, unknown>): Part[] {
  return Object.entries(goodput).flatMap(([name, value]) => {
    const { tokens, seconds } = (typeof value === 'object' && value !== null ? value : {}) as { tokens?: unknown; seconds?: unknown }
    const part = { name, tokens: typeof tokens === 'number' ? tokens : null, seconds: typeof seconds === 'number' ? seconds : null }
    return part.tokens === null && part.seconds === null ? [] : [part]
  })
}

function Goodput({ health }: { health: Health }): JSX.Element {
  const parts = health.goodput ? partsOf(health.goodput) : []
  const states = Object.entries(health.states).map(([name, count]): [string, number] => [name, count])
  return (
    <section data-testid="goodput" aria-labelledby="goodput">
      <h3 id="goodput">Where the work went</h3>
      <Roles health={health} />
      {parts.some((part) => part.tokens !== null) && <Waterfall title="Tokens" rows={parts.map((part) => [part.name, part.tokens ?? 0])} />}
      <Waterfall title="Trajectories" rows={states} />
    </section>
  )
}

/** What each role did of the training: by itself, since one that waits is not made busier by others. */
function Roles({ health }: { health: Health }): JSX.Element | null {
  if (health.roles.length === 0) return null
  const told = (spells: Record<string, number>, say: (value: number) => string): string =>
    Object.entries(spells)
      .sort(([, a], [, b]) => b - a)
      .map(([reason, value]) => `${words(reason)} ${say(value)}`)
      .join(', ')
  return (
    <table class="waterfall" data-table="roles">
      <caption>Time of each role</caption>
      <thead>
        <tr>
          <th scope="col">Role</th>
          <th scope="col" class="count">At work</th>
          <th scope="col">Else, of the training</th>
          <th scope="col">Before and after it</th>
          <td />
        </tr>
      </thead>
      <tbody>
        {health.roles.map(({ role, working, waiting, outside }, index) => (
          <tr key={role} data-role={role}>
            <th scope="row">
              <Untrusted text={role} />
            </th>
            <td class="count">{percent(working)}</td>
            <td>{told(waiting, percent)}</td>
            <td>{told(outside, duration)}</td>
            <td class="wide">
              <Bar to={working ?? 0} colour={kind(index)} />
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  )
}

/** Which weights the engines have proven to compute with: one row for each engine, and the worst proof of the run. */
function Canary({ run, health }: { run: string; health: Health }): JSX.Element {
  return (
    <>
      <h3>Which weights the engines have proven</h3>
      {health.canary.length === 0 ? (
        <p>No proof is on record.</p>
      ) : (
        <div class="scroll" tabIndex={0} role="region" aria-label="Which weights the engines have proven">
          <table data-table="canary">
            <thead>
              <tr>
                <th scope="col">Engine</th>
                <th scope="col">Proof</th>
                <th scope="col" class="count">Version</th>
                <th scope="col" class="count">Distance, nats</th>
                <th scope="col" class="count">Tolerance, nats</th>
                <th scope="col">Proven</th>
              </tr>
            </thead>
            <tbody>
              {health.canary.map(({ engine, version, distance, tolerance, proven, which }) => (
                <tr key={which + engine}>
                  <th scope="row">
                    <a href={to(['runs', run, 'curves'], { curve: `canary.${engine}` })}>
                      <Untrusted text={engine} />
                    </a>
                  </th>
                  <td>{which === 'worst' ? 'worst of the run' : 'newest'}</td>
                  <td class="count">{number(version)}</td>
                  <td class="count">{number(distance)}</td>
                  <td class="count">{number(tolerance)}</td>
                  <td>{proven ? 'yes' : <strong>no</strong>}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </>
  )
}

/** What was spent, part by part: each bar begins where the one before ended. */
function Waterfall({ title, rows }: { title: string; rows: [string, number][] }): JSX.Element {
  const total = rows.reduce((sum, [, value]) => sum + value, 0)
  let before = 0
  return (
    <table class="waterfall">
      <caption>{title}</caption>
      <thead>
        <tr>
          <th scope="col">Part</th>
          <th scope="col" class="count">{title}</th>
          <th scope="col" class="count">Share</th>
          <td />
        </tr>
      </thead>
      <tbody>
        {rows.map(([name, value], index) => {
          const from = total > 0 ? before / total : 0
          before += value
          return (
            <tr key={name}>
              <th scope="row">{words(name)}</th>
              <td class="count">{number(value)}</td>
              <td class="count">{total > 0 ? percent(value / total) : '–'}</td>
              <td class="wide">
                <Bar from={from} to={total > 0 ? before / total : 0} colour={kind(index)} />
              </td>
            </tr>
          )
        })}
        <tr>
          <th scope="row">all</th>
          <td class="count">{number(total)}</td>
          <td />
          <td />
        </tr>
      </tbody>
    </table>
  )
}

/** How far the trained groups are from those that were sampled: the bar is the size of the statistic, which goes from -1 to 1. */
function Bias({ health }: { health: Health }): JSX.Element {
  const entries = Object.entries(health.selection_bias ?? {}).map(([name, value]): [string, number, number] => {
    const { statistic, p } = (value ?? {}) as { statistic?: unknown; p?: unknown }
    return [name, typeof statistic === 'number' ? statistic : 0, typeof p === 'number' ? p : 1]
  })
  return (
    <>
      <h3>Selection bias</h3>
      {health.masked_groups && (
        <p data-testid="masked-groups">
          Of the newest {number(health.masked_groups.groups)} groups {number(health.masked_groups.masked)} are masked in part (
          {percent(health.masked_groups.tokens)} of all tokens). {percent(health.masked_groups.signal)} of them carry a signal,{' '}
          {percent(health.masked_groups.signal_others)} of the others: {percent(health.masked_groups.of_signal)} of the signal is in masked groups.
        </p>
      )}
      {entries.length === 0 ? (
        <p>Not measured.</p>
      ) : (
        <table class="waterfall" data-table="bias">
          <thead>
            <tr>
              <th scope="col">Measure</th>
              <th scope="col" class="count">Statistic</th>
              <th scope="col" class="count">p</th>
              <td />
            </tr>
          </thead>
          <tbody>
            {entries.map(([name, statistic, p], index) => (
              <tr key={name}>
                <th scope="row">{words(name)}</th>
                <td class="count">{number(statistic)}</td>
                <td class="count">{number(p)}</td>
                <td class="wide">
                  <Bar to={Math.min(1, Math.abs(statistic))} colour={kind(index)} />
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </>
  )
}

function Truncation({ run, health }: { run: string; health: Health }): JSX.Element {
  const { share, by_step } = health.truncation
  return (
    <>
      <h3>Truncation</h3>
      <p>
        {share === null ? 'No trajectory is trained yet.' : `${percent(share)} of the trained trajectories were cut off at the limit of tokens.`}{' '}
        <a href={to(['runs', run, 'trajectories'], { where: 'stop=length' })}>Those that were cut off</a>
      </p>
      {by_step.step.length > 1 && (
        <Curve name="truncation" title="share that was cut off" unit="0–1" axis="steps" lines={[{ label: 'truncated', colour: kind(5), x: by_step.step, y: by_step.share, newest: null }]} />
      )}
    </>
  )
}

function RewardByLength({ health }: { health: Health }): JSX.Element | null {
  const bins = health.reward_by_length
  if (bins.length === 0) return null
  const middle = bins.map((bin) => (bin.from + bin.to) / 2)
  const lines = [
    { label: 'mean reward', colour: kind(0), x: middle, y: bins.map((bin) => bin.mean), points: true, newest: null },
    { label: 'share that is right', colour: kind(1), x: middle, y: bins.map((bin) => bin.right), points: true, newest: null },
  ]
  return <Curve name="reward_by_length" title="Reward against length" axis="tokens" lines={lines} />
}

function Prompts({ run, title, prompts }: { run: string; title: string; prompts: AskedPrompt[] }): JSX.Element {
  return (
    <section aria-label={title}>
      <h4>{title}</h4>
      {prompts.length === 0 && <p>None.</p>}
      <ul class="dense">
        {prompts.map((prompt) => (
          <li key={prompt.prompt_id}>
            <a href={to(['runs', run, 'trajectories'], { where: changed('', 'prompt', '=', prompt.prompt_id) })}>
              <Untrusted text={prompt.prompt ?? prompt.prompt_id} />
            </a>{' '}
            <span class="quiet">
              {number(prompt.count)} completions, mean reward {number(prompt.mean)}
            </span>
          </li>
        ))}
      </ul>
    </section>
  )
}

function Duplicates({ health }: { health: Health }): JSX.Element {
  const { answers, prompts, said_often } = health.duplicates
  return (
    <section data-duplicates={answers.duplicate} aria-labelledby="duplicates">
      <h3 id="duplicates">Duplicates</h3>
      <p>
        {number(answers.duplicate)} of the newest {number(answers.looked_at)} completions ({percent(answers.share)}) have the same tokens as another of their group.{' '}
        {number(prompts.duplicate)} of the first {number(prompts.looked_at)} prompts ({percent(prompts.share)}) have the text of another prompt.
      </p>
      {said_often.length > 0 && <p>Said most often, over all prompts:</p>}
      <ul class="dense">
        {said_often.map(({ text, count }) => (
          <li key={text}>
            <Untrusted text={text} /> <span class="quiet">{number(count)} times</span>
          </li>
        ))}
      </ul>
    </section>
  )
}

function Reasons({ run, title, none, reasons }: { run: string; title: string; none: string; reasons: Health['reasons'] }): JSX.Element {
  return (
    <>
      <h3>{title}</h3>
      {reasons.length === 0 ? (
        <p>{none}</p>
      ) : (
        <div class="scroll" tabIndex={0} role="region" aria-label={title}>
          <table data-table={title === 'Undecided verdicts' ? 'undecided' : 'reasons'}>
            <thead>
              <tr>
                <th scope="col">State</th>
                <th scope="col">Reason</th>
                <th scope="col" class="count">Trajectories</th>
              </tr>
            </thead>
            <tbody>
              {reasons.map(({ state, reason, count }) => (
                <tr key={state + reason}>
                  <td>{words(state)}</td>
                  <td class="text">
                    <Untrusted text={reason} />
                  </td>
                  <td class="count">
                    <a href={to(['runs', run, 'trajectories'], { where: changed(`state=${state}`, 'reason', '=', reason) })}>{number(count)}</a>
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </>
  )
}
