// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/internal/figures"
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

// size is a number of bytes, which a table rounds.
type size uint64

// printRows writes a table for people, or each row as a JSON object on a line of its own. Sizes are
// rounded in the table, and names are what a terminal can be given.
func printRows(w io.Writer, asJSON bool, columns []string, rows [][]any) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	if !asJSON {
		fmt.Fprintln(t, strings.Join(columns, "\t"))
	}
	for _, row := range rows {
		object := map[string]any{}
		for k, v := range row {
			object[columns[k]] = v
			switch v := v.(type) {
			case nil: // there is none
				fmt.Fprint(t, "-\t")
			case size:
				fmt.Fprint(t, figures.RoundSize(uint64(v)), "\t")
			case string:
				if quoted := strconv.Quote(v); quoted != `"`+v+`"` {
					v = quoted
				}
				fmt.Fprint(t, cmp.Or(v, "-"), "\t")
			default:
				fmt.Fprint(t, v, "\t")
			}
		}
		fmt.Fprintln(t)
		if asJSON {
			e := json.NewEncoder(w)
			e.SetEscapeHTML(false)
			if err := e.Encode(object); err != nil {
				return fmt.Errorf("write result: %w", err)
			}
		}
	}
	if asJSON {
		return nil
	}
	if err := t.Flush(); err != nil {
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

// progress shows how far the command is: on a terminal in one line that it rewrites, elsewhere in a
// new line every sayEvery.
type progress struct {
	w        io.Writer
	terminal bool
	what     string
	total    int64
	began    time.Time
	said     time.Time
}

const (
	sayEvery  = 10 * time.Second
	drawEvery = 100 * time.Millisecond
)

func newProgress(w io.Writer, total int64, what string) *progress {
	p := &progress{w: w, terminal: isTerminal(w), what: what, total: total, began: time.Now()}
	if !p.terminal {
		p.said = p.began
	}
	return p
}

// set says that n of the total are done.
func (p *progress) set(n int64) {
	form, every := "%s: %d %% done%s\n", sayEvery
	if p.terminal {
		form, every = "\r%s: %d %% done%s\x1b[K", drawEvery
	}
	if p.total > 0 && time.Since(p.said) >= every {
		fmt.Fprintf(p.w, form, p.what, 100*n/p.total, p.left(n))
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

// clear takes the line off the terminal, so that what follows begins on a clean one.
func (p *progress) clear() {
	if p.terminal {
		fmt.Fprint(p.w, "\r\x1b[K")
	}
}
