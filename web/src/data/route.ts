import { useEffect, useState } from 'preact/hooks'

/** Where the page is: the parts of the address behind #/, and its question. Everything that a person chose is in it, so that it can be sent. */
export interface Route {
  parts: string[]
  query: URLSearchParams
}

export function parse(hash: string): Route {
  const [path = '', question = ''] = hash.replace(/^#\/?/, '').split('?', 2)
  return { parts: path.split('/').filter(Boolean).map(decoded), query: new URLSearchParams(question) }
}

function decoded(part: string): string {
  try {
    return decodeURIComponent(part)
  } catch {
    return part // a broken percent sign in an address that was typed
  }
}

export function to(parts: string[], query: Record<string, string | number | undefined> = {}): string {
  const present = Object.entries(query).filter(([, value]) => value !== undefined && value !== '')
  const question = new URLSearchParams(present.map(([key, value]) => [key, String(value)])).toString()
  return `#/${parts.map(encodeURIComponent).join('/')}${question && `?${question}`}`
}

export function go(hash: string): void {
  window.location.hash = hash
}

/** Changes the question of this page without a step in the browser's history. */
export function adjust(values: Record<string, string | number | undefined>): void {
  const { parts, query } = parse(window.location.hash)
  const merged: Record<string, string | number | undefined> = { ...Object.fromEntries(query), ...values }
  window.history.replaceState(null, '', to(parts, merged))
  window.dispatchEvent(new HashChangeEvent('hashchange'))
}

export function useRoute(): Route {
  const [route, setRoute] = useState(() => parse(window.location.hash))
  useEffect(() => {
    const changed = (): void => setRoute(parse(window.location.hash))
    window.addEventListener('hashchange', changed)
    return () => window.removeEventListener('hashchange', changed)
  }, [])
  return route
}
