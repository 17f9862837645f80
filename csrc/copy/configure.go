// SPDX-License-Identifier: Apache-2.0

package copy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluicehq/sluice/driver"
)

// Tuned is the content of a file that "sluice doctor --tune" writes. The JSON keys are an
// interface.
type Tuned struct {
	Machine  Machine   `json:"machine"`
	Measured time.Time `json:"measured"`
	Variant  string    `json:"variant"`
	Run      uint64    `json:"run"`  // Way.Run
	From     uint64    `json:"from"` // Choice.From
	Why      string    `json:"why"`
}

// Machine tells machines apart that copy differently.
type Machine struct {
	Arch   string   `json:"arch"`
	CPU    string   `json:"cpu"`
	Caches []string `json:"caches"` // of the first processor: "L3 32768K"
}

// String names the processor and the caches.
func (m *Machine) String() string {
	return fmt.Sprintf("%s, %s, %s", m.CPU, m.Arch, strings.Join(m.Caches, ", "))
}

// ThisMachine looks at the machine.
func ThisMachine() Machine { return machineAt("/proc/cpuinfo", cpu0Cache) }

func machineAt(cpuinfo, caches string) Machine {
	m := Machine{Arch: runtime.GOARCH, CPU: "unknown processor", Caches: []string{}}
	text, _ := os.ReadFile(cpuinfo) // a kernel that does not tell: the caches have to do
	first, _, _ := strings.Cut(string(text), "\n\n")
	var name []string
	for line := range strings.Lines(first) {
		key, value, _ := strings.Cut(line, ":")
		switch strings.TrimSpace(key) {
		case "model name", "CPU implementer", "CPU part", "CPU variant": // arm64 has numbers
			name = append(name, strings.TrimSpace(value))
		}
	}
	if len(name) > 0 {
		m.CPU = strings.Join(name, " ")
	}
	files, _ := filepath.Glob(filepath.Join(caches, "index*")) // its error is a bad pattern
	for _, f := range files {
		level, _ := os.ReadFile(filepath.Join(f, "level"))
		size, _ := os.ReadFile(filepath.Join(f, "size"))
		m.Caches = append(m.Caches, fmt.Sprintf("L%s %s", bytes.TrimSpace(level),
			bytes.TrimSpace(size)))
	}
	return m
}

// File is the choice as Configure reads it.
func (c *Choice) File() Tuned {
	return Tuned{Machine: ThisMachine(), Measured: time.Now().UTC().Truncate(time.Second),
		Variant: c.Way.Variant.String(), Run: c.Way.Run, From: c.From, Why: c.Why}
}

// Configure makes the choice of this process, as a Config says it: by the name of a variant, for
// the long runs of all batches, or by the path of a file that "sluice doctor --tune" wrote on this
// machine. A path has a slash. Empty leaves it to the measurement. A process has one choice: after
// one that succeeded, another value is an error. Parallel calls are allowed.
func Configure(how string) error { return process.configure(how, ThisMachine) }

func (p *choice) configure(how string, here func() Machine) error {
	if how == "" {
		return nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.configured == how {
		return nil
	}
	if p.configured != "" {
		return fmt.Errorf("host copy by %q: this process has one choice, and that was made by %q: "+
			"configure all backends alike: %w", how, p.configured, driver.ErrBounds)
	}
	c, err := read(how, here)
	if err != nil {
		return err
	}
	p.made.Store(&c)
	p.configured = how
	return nil
}

// read reads what a Config says.
func read(how string, here func() Machine) (Choice, error) {
	if strings.Contains(how, "/") {
		return readFile(how, here())
	}
	v, err := ParseVariant(how)
	if err != nil {
		return Choice{}, fmt.Errorf("%w, or name a file of sluice doctor --tune by a path with a "+
			"slash: %w", err, driver.ErrBounds)
	}
	return Only(v), nil
}

// fileMax is many times what such a file has.
const fileMax = 64 << 10

// readFile refuses what was measured on another machine: the quick measurement is better than that.
func readFile(path string, here Machine) (Choice, error) {
	text, err := readRegular(path)
	if err != nil {
		return Choice{}, fmt.Errorf("host copy: %w", err)
	}
	broken := func(why any) error {
		return fmt.Errorf("host copy: %s is not what sluice doctor --tune writes (%v): let it "+
			"write the file anew: %w", path, why, driver.ErrBounds)
	}
	var t Tuned
	switch err := json.Unmarshal(text, &t); {
	case err != nil:
		return Choice{}, broken(err)
	case t.Variant == "" || t.Run == 0 || t.Machine.CPU == "":
		return Choice{}, broken("variant, run or machine is missing")
	case t.Machine.Arch != here.Arch || t.Machine.CPU != here.CPU ||
		!slices.Equal(t.Machine.Caches, here.Caches):
		return Choice{}, fmt.Errorf("host copy: %s was measured on another machine (%v) than this "+
			"one (%v): run sluice doctor --tune here: %w", path, &t.Machine, &here,
			driver.ErrBounds)
	}
	v, err := ParseVariant(t.Variant)
	if err != nil {
		return Choice{}, fmt.Errorf("host copy: %s: %w: run sluice doctor --tune of this build: %w",
			path, err, driver.ErrBounds)
	}
	return Choice{Way: Way{v, t.Run}, From: t.From, Why: fmt.Sprintf("%s; measured %s, from %s",
		t.Why, t.Measured.Format(time.DateOnly), path)}, nil
}

// readRegular does not wait for the other end of a pipe.
func readRegular(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("%w: name a file that sluice doctor --tune wrote", err)
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil {
		return nil, err
	} else if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is no file: name one that sluice doctor --tune wrote: %w",
			path, driver.ErrBounds)
	}
	return io.ReadAll(io.LimitReader(f, fileMax))
}
