// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/sluicehq/sluice/internal/figures"
)

// Text prints the report as text: the machine and the settings, the comparison, and all rows.
func (r *Report) Text(w io.Writer) error {
	var b strings.Builder
	r.head(&b)
	r.standing(&b)
	for _, lane := range Lanes {
		r.summary(&b, lane)
	}
	for _, lane := range Lanes {
		r.transfers(&b, lane)
	}
	r.specials(&b)
	_, err := io.WriteString(w, b.String())
	return err
}

func (r *Report) head(b *strings.Builder) {
	m := &r.Machine
	took := fmt.Sprintf("%.0f minutes", r.Minutes)
	if r.Minutes < 1 {
		took = fmt.Sprintf("%.0f s", 60*r.Minutes)
	}
	fmt.Fprintf(b, "%s, %d processors, %.0f GiB, Linux %s, %s, %s\n", m.Processor,
		m.Processors, m.MemoryGiB, m.Kernel,
		r.Begun.Format("2006-01-02 15:04 MST"), took)
	if r.Revision != "" {
		fmt.Fprintf(b, "sluice at %s\n", r.Revision)
	}
	fmt.Fprintf(b, "%d rounds of %.0f ms for each participant and shape, in turn; ", r.Rounds,
		r.SliceMS)
	if r.Memory > 0 {
		fmt.Fprintf(b, "%s registered at each end; ", figures.FormatSize(r.Memory))
	}
	fmt.Fprintf(b, "load %.1f before, %.1f after\n", m.LoadBefore, m.LoadAfter)
	if m.Indicative {
		fmt.Fprintln(b, "INDICATIVE: others used the machine meanwhile. Ratios between "+
			"participants may hold, figures do not.")
	}
	fmt.Fprintln(b)
	t := table(b, 0)
	for _, k := range r.Peers {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", k.Lane, k.Name, k.Version, k.Settings)
	}
	t.Flush()
	for i := range r.Rows {
		if row := &r.Rows[i]; row.Kind == KindTransfer && row.Size == 0 {
			fmt.Fprintf(b, "%s  %s has no figures: %s\n", row.Lane, row.Peer, row.Reason)
		}
	}
}

func table(w io.Writer, flags uint) *tabwriter.Writer {
	return tabwriter.NewWriter(w, 0, 0, 2, ' ', flags)
}

// figure formats a number with three significant digits, or more before the point.
func figure(v float64) string {
	switch {
	case v >= 100:
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	case v >= 1:
		return fmt.Sprintf("%.2f", v)
	}
	return fmt.Sprintf("%.3f", v)
}

func (r *Report) transfers(b *strings.Builder, lane Lane) {
	rows := r.of(KindTransfer, lane)
	rows = slices.DeleteFunc(rows, func(row *Row) bool { return row.Size == 0 })
	if len(rows) == 0 {
		return
	}
	fmt.Fprintf(b, "\n## Lane %s: transfers\n\n", lane)
	t := table(b, tabwriter.AlignRight)
	fmt.Fprintln(t, "op\twhere\tsize\tbatch\tpeer\tGB/s\tpieces/s\tp50 µs\tp99 µs\tCPU s/GB\tops\t")
	for _, row := range rows {
		size, batch, where := figures.FormatSize(row.Size), strconv.Itoa(row.Batch), row.Where
		if row.Bytes > 0 { // the driver has said it
			size, batch, where = figures.RoundSize(row.Bytes), "1", "-"
		}
		if row.Threads > 1 {
			where += fmt.Sprintf(", %d threads", row.Threads)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t", row.Op, where, size, batch, row.Peer)
		if row.Reason != "" {
			fmt.Fprintf(t, "-\t-\t-\t-\t-\t-\t  %s\n", row.Reason)
			continue
		}
		cpu := "-"
		if !row.Timed {
			cpu = figure(row.CPUPerGB)
		}
		fmt.Fprintf(t, "%s\t%.0f\t%.1f\t%.1f\t%s\t%d\t%s\n", figure(row.GBps), row.DescsPerS,
			row.P50us, row.P99us, cpu, row.Ops, beside(row))
	}
	t.Flush()
}

// beside formats the ratios of a row to the yardsticks, and its remark.
func beside(row *Row) string {
	var words []string
	for _, name := range slices.Sorted(maps.Keys(row.Ratios)) {
		words = append(words, fmt.Sprintf("%.2f of %s", row.Ratios[name], name))
	}
	if row.Note != "" {
		words = append(words, row.Note)
	}
	if len(words) == 0 {
		return ""
	}
	return "  " + strings.Join(words, ", ")
}

// of returns the rows of a kind on a lane, in the order of the run.
func (r *Report) of(kind string, lane Lane) []*Row {
	var list []*Row
	for i := range r.Rows {
		if row := &r.Rows[i]; row.Kind == kind && (lane == "" || row.Lane == lane) {
			list = append(list, row)
		}
	}
	return list
}

// specials lists the other kinds of rows, with the format of their figures.
var specials = []struct {
	kind, title string
	say         func(*Row) string
}{
	{KindPing, "Round trip of a notification, each end waiting as its makers advise",
		func(r *Row) string {
			text := fmt.Sprintf("p50 %.1f µs, p99 %.1f µs", r.P50us, r.P99us)
			if r.Note != "" {
				text += ": " + r.Note
			}
			return text
		}},
	{KindIdle, "Processors taken by both ends while nothing is asked of them", func(r *Row) string {
		return fmt.Sprintf("%.1f %% of one", 100*r.Share)
	}},
}

func clip(s string, n int) string {
	s = strings.Join(strings.Fields(s), " ")
	if runes := []rune(s); len(runes) > n {
		return string(runes[:n-1]) + "…"
	}
	return s
}

func (r *Report) specials(b *strings.Builder) {
	for _, s := range specials {
		rows := r.of(s.kind, "")
		if len(rows) == 0 {
			continue
		}
		slices.SortStableFunc(rows, func(a, b *Row) int { return cmp.Compare(a.Lane, b.Lane) })
		fmt.Fprintf(b, "\n## %s\n\n", s.title)
		t := table(b, 0)
		for _, row := range rows {
			text := clip(row.Reason, 200)
			if text == "" {
				text = s.say(row)
			}
			fmt.Fprintf(t, "%s\t%s\t%s\n", row.Lane, row.Peer, text)
		}
		t.Flush()
	}
}
