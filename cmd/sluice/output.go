// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/sys/unix"
)

// printJSON writes one indented value and a line feed.
func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return fmt.Errorf("write result: %w", err)
	}
	return nil
}

// isTerminal reports whether w is a terminal.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// progress is a bar on a terminal, and elsewhere a line every sayEvery.
type progress struct {
	bar   *progressbar.ProgressBar
	w     io.Writer
	what  string
	total int64
	began time.Time
	said  time.Time
}

const sayEvery = 10 * time.Second

func newProgress(w io.Writer, total int64, what string) *progress {
	return drawProgress(w, total, what, progressbar.OptionShowCount())
}

// newBytesProgress is a bar that counts bytes, and says how many come in a second.
func newBytesProgress(w io.Writer, total int64, what string) *progress {
	return drawProgress(w, total, what, progressbar.OptionShowBytes(true),
		progressbar.OptionUseIECUnits(true))
}

func drawProgress(w io.Writer, total int64, what string, counts ...progressbar.Option) *progress {
	if !isTerminal(w) {
		return &progress{w: w, what: what, total: total, began: time.Now(),
			said: time.Now()}
	}
	bar := progressbar.NewOptions64(total, append(counts,
		progressbar.OptionSetWriter(w),
		progressbar.OptionSetDescription(what),
		progressbar.OptionSetPredictTime(true),
		progressbar.OptionThrottle(100*time.Millisecond),
		progressbar.OptionClearOnFinish(),
	)...)
	_ = bar.RenderBlank() // work of a moment shows as well
	return &progress{bar: bar}
}

// set moves the bar to n of the total.
func (p *progress) set(n int64) {
	if p.bar != nil {
		_ = p.bar.Set64(n) // a bar that cannot be drawn must not end the work
		return
	}
	if p.total > 0 && time.Since(p.said) >= sayEvery {
		fmt.Fprintf(p.w, "%s: %d %% done%s\n", p.what, 100*n/p.total, p.left(n))
		p.said = time.Now()
	}
}

// left says how long the rest takes at the pace so far.
func (p *progress) left(n int64) string {
	if n <= 0 {
		return ""
	}
	rest := time.Duration(float64(time.Since(p.began)) * float64(p.total-n) / float64(n))
	return fmt.Sprintf(", some %v to go", rest.Round(time.Second))
}

// clear takes the bar off the terminal, so that what follows begins on a clean
// line.
func (p *progress) clear() {
	if p.bar != nil {
		_ = p.bar.Clear()
	}
}
