import { useEffect, useState } from 'preact/hooks'

/** Light and dark: the system's choice until a person makes one, which this browser keeps. */
const KEY = 'stretto-watch-theme'
const system = window.matchMedia('(prefers-color-scheme: dark)')

export function isDark(): boolean {
  const chosen = window.localStorage.getItem(KEY)
  return chosen === null ? system.matches : chosen === 'dark'
}

export function applyTheme(): void {
  document.documentElement.style.colorScheme = isDark() ? 'dark' : 'light'
}

export function switchTheme(): void {
  window.localStorage.setItem(KEY, isDark() ? 'light' : 'dark')
  applyTheme()
  window.dispatchEvent(new Event('themechange'))
}

export function useDark(): boolean {
  const [dark, setDark] = useState(isDark)
  useEffect(() => {
    const changed = (): void => {
      applyTheme()
      setDark(isDark())
    }
    system.addEventListener('change', changed)
    window.addEventListener('themechange', changed)
    return () => {
      system.removeEventListener('change', changed)
      window.removeEventListener('themechange', changed)
    }
  }, [])
  return dark
}
