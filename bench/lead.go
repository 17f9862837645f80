// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/sluicehq/sluice/internal/figures"
)

// Lead compares each variant of sluice with the fastest other engine in one shape.
type Lead struct {
	Shape
	Theirs *Row            // the fastest other engine
	Ours   map[string]*Row // variants of sluice, by name of the participant
}

// Ratio returns how many times as fast a variant of sluice is as the fastest other engine: above 1,
// sluice is faster. It compares median times of one operation, which other work on the machine
// disturbs least. It is 0 if one of the two has no figure.
func (l *Lead) Ratio(peer string) float64 {
	if l.Ours[peer] == nil {
		return 0
	}
	return l.Theirs.P50us / l.Ours[peer].P50us
}

// Best returns the largest ratio.
func (l *Lead) Best() float64 {
	best := 0.0
	for peer := range l.Ours {
		best = max(best, l.Ratio(peer))
	}
	return best
}

// Leads returns the shapes in which both sides have a figure, in the order of the run. It leaves
// out yardsticks.
func (r *Report) Leads(lane Lane) []Lead {
	var list []Lead
	at := map[Shape]int{}
	for _, row := range r.of(KindTransfer, lane) {
		if row.P50us == 0 || row.Yardstick {
			continue
		}
		i, ok := at[row.Shape]
		if !ok {
			i = len(list)
			at[row.Shape] = i
			list = append(list, Lead{Shape: row.Shape, Ours: map[string]*Row{}})
		}
		switch l := &list[i]; {
		case row.Ours:
			l.Ours[row.Peer] = row
		case l.Theirs == nil || l.Theirs.P50us > row.P50us:
			l.Theirs = row
		}
	}
	return slices.DeleteFunc(list, func(l Lead) bool { return l.Theirs == nil || len(l.Ours) == 0 })
}

func (r *Report) summary(b *strings.Builder, lane Lane) {
	leads := r.Leads(lane)
	if len(leads) == 0 {
		return
	}
	ours := r.ours(lane)
	fmt.Fprintf(b, "\n## Lane %s: sluice beside the best of the others, by p50: above 1 "+
		"is faster\n\n", lane)
	t := table(b, tabwriter.AlignRight)
	fmt.Fprintf(t, "op\twhere\tsize\tbatch\tbest of the others\tGB/s\tp50 µs\t%s\t\n",
		strings.Join(ours, "\t"))
	behind := 0
	for i := range leads {
		l := &leads[i]
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%s\t%s\t%.1f\t", l.Op, l.Where,
			figures.FormatSize(l.Size), l.Batch,
			l.Theirs.Peer, figure(l.Theirs.GBps), l.Theirs.P50us)
		for _, peer := range ours {
			if ratio := l.Ratio(peer); ratio > 0 {
				fmt.Fprintf(t, "%.2f", ratio)
			} else {
				fmt.Fprint(t, "-")
			}
			fmt.Fprint(t, "\t")
		}
		if l.Best() < 1 {
			behind++
			fmt.Fprint(t, "  behind")
		}
		fmt.Fprintln(t)
	}
	t.Flush()
	fmt.Fprintf(b, "\nBehind with all of ours in %d of %d shapes.\n", behind, len(leads))
	if lane == File {
		fmt.Fprint(b, "A file for each. Whole blocks of 4 KiB go past the page cache, with "+
			"nothing of the file there; other pieces through it, with all of the file there.\n")
	}
}

// ours returns the variants of sluice that have rows on a lane.
func (r *Report) ours(lane Lane) []string {
	var list []string
	for _, row := range r.of(KindTransfer, lane) {
		if row.Ours && row.Size > 0 && !slices.Contains(list, row.Peer) {
			list = append(list, row.Peer)
		}
	}
	return list
}

// Between the ratios evenFrom and evenTo, neither side counts as ahead.
const evenFrom, evenTo = 0.95, 1.05

// score counts the shapes in which a variant of sluice is ahead of the fastest other engine, about
// even with it, or behind.
type score struct{ ahead, even, behind int }

// scoreOf counts over the leads of a lane. It skips shapes in which one side has no figure.
func scoreOf(leads []Lead, peer string) (s score) {
	for i := range leads {
		switch ratio := leads[i].Ratio(peer); {
		case ratio == 0:
		case ratio > evenTo:
			s.ahead++
		case ratio >= evenFrom:
			s.even++
		default:
			s.behind++
		}
	}
	return s
}

// standing writes the summary that comes before the tables.
func (r *Report) standing(b *strings.Builder) {
	begun := false
	for _, lane := range Lanes {
		leads := r.Leads(lane)
		for _, peer := range r.ours(lane) {
			s := scoreOf(leads, peer)
			if s == (score{}) {
				continue
			}
			if !begun {
				fmt.Fprint(b, "\nBy p50 of one operation, beside the best of the others in each "+
					"shape (even: within 5 %):\n")
				begun = true
			}
			fmt.Fprintf(b, "%s: %s is ahead in %d shapes, even in %d, behind in %d\n", lane, peer,
				s.ahead, s.even, s.behind)
		}
	}
}
