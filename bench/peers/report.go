// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Report is one run: where, with what, and its rows. The JSON keys are an interface.
type Report struct {
	Machine  Machine   `json:"machine"`
	Begun    time.Time `json:"begun"`
	Revision string    `json:"revision,omitempty"` // of sluice
	Minutes  float64   `json:"minutes"`
	Quick    bool      `json:"quick,omitempty"`
	Rounds   int       `json:"rounds"`
	SliceMS  float64   `json:"slice_ms"`

	LimitMinutes float64 `json:"limit_minutes,omitempty"`
	// for which a caller was watched; negative: it was not
	FateSeconds float64 `json:"fate_seconds,omitempty"`

	Memory uint64  `json:"memory"` // registered at each end
	Peers  []Known `json:"peers"`
	Rows   []Row   `json:"rows"`
}

// Machine is where the run was.
type Machine struct {
	Processor  string  `json:"processor"`
	Processors int     `json:"processors"`
	MemoryGiB  float64 `json:"memory_gib"`
	Kernel     string  `json:"kernel"`
	LoadBefore float64 `json:"load_before"` // of one minute
	LoadAfter  float64 `json:"load_after"`
	// processors that others used just before, as /proc/stat has it
	BusyBefore float64 `json:"busy_before"`
	BusyAfter  float64 `json:"busy_after"`

	// Indicative says that others used the machine when the run began, or when it ended: the load
	// average does not, since it remembers what built the programs.
	Indicative bool `json:"indicative,omitempty"`
}

// busyFrom is the share of all processors from which on others disturb.
const busyFrom = 0.1

// Known is what a participant says of itself.
type Known struct {
	Lane     Lane   `json:"lane"`
	Name     string `json:"name"`
	Version  string `json:"version"`
	Settings string `json:"settings"`
}

func newReport(o Options) *Report {
	r := &Report{Machine: thisMachine(), Begun: time.Now().UTC().Truncate(time.Second),
		Quick: o.Quick, Rounds: o.Rounds,
		SliceMS: o.Slice.Seconds() * 1e3, LimitMinutes: o.Limit.Minutes(),
		FateSeconds: o.Fate.Seconds(), Memory: o.Memory, Revision: o.Revision}
	r.Machine.BusyBefore = busy(o.Idle)
	r.Machine.judge()
	return r
}

// end watches the machine once more, when all processes are gone.
func (r *Report) end(watch time.Duration) {
	r.Minutes = time.Since(r.Begun).Minutes()
	r.Machine.LoadAfter, r.Machine.BusyAfter = load(), busy(watch)
	r.Machine.judge()
}

func (m *Machine) judge() {
	m.Indicative = max(m.BusyBefore, m.BusyAfter) > busyFrom*float64(m.Processors)
}

func (r *Report) add(row Row) { r.Rows = append(r.Rows, row) }

// order sorts the rows from one on by their shapes, as a list has them; rows of no shape come last.
func (r *Report) order(from int, list []Shape) {
	at := func(row *Row) uint { return uint(slices.Index(list, row.Shape)) } // -1 is the largest
	slices.SortStableFunc(r.Rows[from:], func(a, b Row) int { return cmp.Compare(at(&a), at(&b)) })
}

func (r *Report) know(p *Pair) {
	k := Known{p.Lane, p.Name, p.Version, p.Settings}
	if !slices.Contains(r.Peers, k) {
		r.Peers = append(r.Peers, k)
	}
}

// Write writes JSON.
func (r *Report) Write(w io.Writer) error {
	out := json.NewEncoder(w)
	out.SetIndent("", " ")
	return out.Encode(r)
}

// Read reads a report that was written.
func Read(from io.Reader) (*Report, error) {
	r := &Report{}
	if err := json.NewDecoder(from).Decode(r); err != nil {
		return nil, fmt.Errorf("read a report: %w", err)
	}
	return r, nil
}

func thisMachine() Machine {
	m := Machine{Processor: "unknown", Processors: runtime.NumCPU(), LoadBefore: load()}
	if text, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		if _, after, ok := strings.Cut(string(text), "model name\t: "); ok {
			m.Processor, _, _ = strings.Cut(after, "\n")
		}
	}
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		m.MemoryGiB = float64(info.Totalram*uint64(info.Unit)) / (1 << 30)
	}
	var name unix.Utsname
	if unix.Uname(&name) == nil {
		m.Kernel = unix.ByteSliceToString(name.Release[:])
	}
	return m
}

// load is that of the last minute; 0 where the kernel does not say.
func load() float64 {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(text), " ")
	l, _ := strconv.ParseFloat(first, 64)
	return l
}

// busy is how many processors were in use while we slept for so long; 0 where the kernel does
// not say.
func busy(watch time.Duration) float64 {
	worked, idle := ticks(os.ReadFile("/proc/stat"))
	time.Sleep(watch)
	after, idleAfter := ticks(os.ReadFile("/proc/stat"))
	if whole := after - worked + idleAfter - idle; whole > 0 {
		return (after - worked) / whole * float64(runtime.NumCPU())
	}
	return 0
}

// ticks are those of all processors since the machine began: at work, or stolen, and idle, or
// waiting for a disk. The first line is "cpu user nice system idle iowait irq softirq steal guest
// guest_nice", and guests are in user as well.
func ticks(stat []byte, err error) (worked, idle float64) {
	line, _, _ := strings.Cut(string(stat), "\n")
	fields := strings.Fields(line)
	if err != nil || len(fields) < 9 || fields[0] != "cpu" {
		return 0, 0
	}
	for i, field := range fields[1:9] {
		n, err := strconv.ParseFloat(field, 64)
		switch {
		case err != nil:
			return 0, 0
		case i == 3 || i == 4:
			idle += n
		default:
			worked += n
		}
	}
	return worked, idle
}
