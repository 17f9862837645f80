// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/kv/cache"
)

// cacheConfig is the file of sluice cache serve. docs/cache.md has the fields.
type cacheConfig struct {
	Name, Socket, Metrics string
	Listen, Backends      []string
	Plaintext             bool
	InspectRemote         bool     `toml:"inspect_remote"`
	StartTimeout          duration `toml:"start_timeout"`
	DrainTimeout          duration `toml:"drain_timeout"`
	Policy                cache.Policy
	Blocks                uint64
	VerifyFirst           bool `toml:"verify_first"`
	CompareKnown          bool `toml:"compare_known"`
	Operations            int
	HoldMax               size `toml:"hold_max"`
	Identity              struct{ Certificate, Key, Authority, Revoked string }
	Memory                cacheMemory
	Disks                 []cacheDisk `toml:"disk"`
	Schedule              struct {
		Off           bool
		BytesInFlight size `toml:"bytes_in_flight"`
		PieceBytes    size `toml:"piece_bytes"`
		Prefetch      int
		SwapOut       int `toml:"swap_out"`
		QueuedMax     int `toml:"queued_max"`
	}
	Namespaces []struct {
		Name         string // "*": those that no other entry names
		Priority     int
		MemoryQuota  size `toml:"memory_quota"`
		DiskQuota    size `toml:"disk_quota"`
		Flow         string
		TTL          duration
		HoldMax      size `toml:"hold_max"`
		BytesASecond size `toml:"bytes_a_second"`
	} `toml:"namespace"`

	text string // of the file
	path string
}

type cacheMemory struct {
	Path          string
	Bytes, Extent size
}

type cacheDisk struct {
	cacheMemory
	Blocks    uint64
	BytesADay size `toml:"bytes_a_day"`
	Durable   bool
	SlowAfter duration `toml:"slow_after"`
}

// size is a number of bytes, written as "64GiB" or as a number.
type size uint64

// UnmarshalText implements encoding.TextUnmarshaler.
func (s *size) UnmarshalText(text []byte) error {
	n, err := figures.ParseSize(string(text))
	*s = size(n)
	return err
}

// duration is written as "30s".
type duration time.Duration

// UnmarshalText implements encoding.TextUnmarshaler.
func (d *duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(string(text))
	if err != nil || v <= 0 {
		return fmt.Errorf("%q is no time such as 500ms or 30s", text)
	}
	*d = duration(v)
	return nil
}

// configError names what is wrong in a config: the key and, where it is known, the line.
func configError(path string, line int, key string, err error) error {
	if line > 0 {
		path += fmt.Sprintf(", line %d", line)
	}
	if key != "" {
		path += ": " + key
	}
	return fmt.Errorf("%s: %w", path, err)
}

// readCacheConfig reads a config, puts the defaults in, and checks all that can be checked without
// opening anything.
func readCacheConfig(path string) (*cacheConfig, error) {
	info, err := os.Stat(path)
	if err == nil && (!info.Mode().IsRegular() || info.Size() > 1<<20) {
		err = fmt.Errorf("%s is no file of at most 1 MiB", path)
	}
	var text []byte
	if err == nil {
		text, err = os.ReadFile(path)
	}
	if err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	host, _ := os.Hostname()
	c := &cacheConfig{path: path, text: string(text), Name: host, Socket: defaultSocket(),
		StartTimeout: duration(30 * time.Second), DrainTimeout: duration(30 * time.Second)}
	d := toml.NewDecoder(bytes.NewReader(text)).DisallowUnknownFields()
	var unknown *toml.StrictMissingError
	var wrong *toml.DecodeError
	switch err = d.Decode(c); {
	case errors.As(err, &unknown):
		wrong = &unknown.Errors[0]
		err = errors.New("there is no such key; docs/cache.md has those that there are")
	case errors.As(err, &wrong):
		text, _, of := strings.Cut(strings.TrimPrefix(err.Error(), "toml: "), " into struct field")
		if of { // of a Go type
			text += ": it wants a value of another type"
		}
		text, _, _ = strings.Cut(text, " cannot be stored in main.")
		err = errors.New(text)
	}
	if wrong != nil {
		line, _ := wrong.Position()
		return nil, configError(path, line, strings.Join(wrong.Key(), "."), err)
	}
	if err != nil {
		return nil, configError(path, 0, "", err)
	}
	if err := c.check(); err != nil {
		return nil, err
	}
	return c, nil
}

// wrong is an error about a key of a table, of which there may be several; nth counts them from 0.
// Its line is that of the table where it does not have the key, as it never has "".
func (c *cacheConfig) wrong(table string, nth int, key, format string, args ...any) error {
	at, line := "", 0
	for n, text := range strings.Split(c.text, "\n") {
		text, _, _ = strings.Cut(text, "#")
		name, _, _ := strings.Cut(text, "=")
		switch text = strings.TrimSpace(text); {
		case strings.HasPrefix(text, "["):
			if at == table {
				nth--
			}
			if at = strings.Trim(text, "[] \t"); at == table && nth == 0 {
				line = n + 1
			}
		case at == table && nth == 0 && strings.TrimSpace(name) == key && text != "":
			line = n + 1
			nth--
		}
	}
	return configError(c.path, line, strings.Trim(table+"."+key, "."),
		fmt.Errorf(format, args...))
}

const wantTime = "want a time such as \"500ms\" or \"30s\""

func (c *cacheConfig) check() error {
	id, q := &c.Identity, &c.Schedule
	secure := id.Certificate != "" && id.Key != "" && id.Authority != ""
	weight := func(n int) bool { return n < 0 || n > 1<<20 }
	bare := func(d duration) bool { return d < duration(time.Millisecond) } // a number of ns
	for _, w := range []struct {
		bad              bool
		table, key, text string
	}{
		{c.Name == "" || len(c.Name) > 255, "", "name", "want from 1 to 255 bytes"},
		{c.Socket == "" || len(c.Socket) > 107, "", "socket", "want a path of 1 to 107 bytes"},
		{bare(c.StartTimeout), "", "start_timeout", wantTime},
		{bare(c.DrainTimeout), "", "drain_timeout", wantTime},
		{!secure && *id != (cacheConfig{}).Identity, "identity", "",
			"an identity has certificate, key and authority"},
		{secure && c.Plaintext, "", "plaintext", "with an identity nothing is in plain text"},
		{len(c.Listen) > 0 && !secure && !c.Plaintext, "", "listen", "name the files of an " +
			"[identity], or set plaintext = true on a network that is trusted"},
		{q.BytesInFlight > 1<<40, "schedule", "bytes_in_flight", "want at most 1 TiB"},
		{q.PieceBytes > min(64<<20, cmp.Or(q.BytesInFlight, 2<<20)), "schedule", "piece_bytes",
			"want at most bytes_in_flight, and 64 MiB"},
		{weight(q.Prefetch), "schedule", "prefetch", "want at most 1,048,576"},
		{weight(q.SwapOut), "schedule", "swap_out", "want at most 1,048,576"},
		{weight(q.QueuedMax), "schedule", "queued_max", "want at most 1,048,576"},
	} {
		if w.bad {
			return c.wrong(w.table, 0, w.key, "%s", w.text)
		}
	}
	for n, address := range append([]string{c.Metrics}, c.Listen...) {
		if _, _, err := net.SplitHostPort(address); err != nil && (n > 0 || address != "") {
			return c.wrong("", 0, []string{"metrics", "listen"}[min(n, 1)],
				"%q is no HOST:PORT", address)
		}
	}
	for _, text := range c.Backends {
		var spec backendSpec
		if err := spec.Set(text); err != nil {
			return c.wrong("", 0, "backends", "%w", err)
		}
		if spec.name == auto {
			return c.wrong("", 0, "backends", "name each one: auto is of the command line")
		}
	}
	names := map[string]bool{}
	for n, s := range c.Namespaces {
		switch {
		case s.Name == "":
			return c.wrong("namespace", n, "name", "want a name, or \"*\" for all others")
		case names[s.Name]:
			return c.wrong("namespace", n, "name", "%q is there twice", s.Name)
		case s.TTL%duration(time.Second) != 0:
			return c.wrong("namespace", n, "ttl", "%v: want whole seconds, such as \"60s\"",
				time.Duration(s.TTL))
		}
		if _, err := cache.ParseFlow(s.Flow); err != nil {
			return c.wrong("namespace", n, "flow", "%w", err)
		}
		if o := c.options(s.Name); o.Check() != nil {
			return c.wrong("namespace", n, "", "%w", o.Check())
		}
		names[s.Name] = true
	}
	// What the cache would refuse, part by part.
	all := c.cache()
	type part struct {
		table string
		nth   int
		key   string
		cfg   cache.Config
	}
	parts := []part{{"memory", 0, "", cache.Config{}},
		{"", 0, "policy", cache.Config{Policy: all.Policy}},
		{"", 0, "operations", cache.Config{OpsMax: all.OpsMax}},
		{"", 0, "hold_max", cache.Config{HoldMax: all.HoldMax}}}
	for n := range all.Disks {
		parts = append(parts, part{"disk", n, "", cache.Config{Disks: all.Disks[:n+1]}})
	}
	for _, p := range append(parts, part{"", 0, "blocks", all}) {
		p.cfg.Memory = all.Memory
		if err := p.cfg.Check(); err != nil {
			return c.wrong(p.table, p.nth, p.key, "%w", err)
		}
	}
	return nil
}

// cache is the config of the cache itself, without its engine.
func (c *cacheConfig) cache() cache.Config {
	cfg := cache.Config{Policy: c.Policy, Blocks: c.Blocks, VerifyFirst: c.VerifyFirst,
		CompareKnown: c.CompareKnown, OpsMax: c.Operations, HoldMax: uint64(c.HoldMax),
		Memory: cache.MemoryConfig{Path: c.Memory.Path, Bytes: uint64(c.Memory.Bytes),
			Extent: uint64(c.Memory.Extent)}}
	for _, d := range c.Disks {
		cfg.Disks = append(cfg.Disks, cache.DiskConfig{Path: d.Path, Bytes: uint64(d.Bytes),
			Extent: uint64(d.Extent), Blocks: d.Blocks, BytesADay: uint64(d.BytesADay),
			Durable: d.Durable, SlowAfter: time.Duration(d.SlowAfter)})
	}
	return cfg
}

// schedule is what the engine does first.
func (c *cacheConfig) schedule() *engine.Schedule {
	s := &c.Schedule
	if s.Off {
		return nil
	}
	return &engine.Schedule{BytesInFlight: int(s.BytesInFlight), PieceBytes: int(s.PieceBytes),
		Prefetch: s.Prefetch, SwapOut: s.SwapOut, QueuedMax: s.QueuedMax}
}

// options are what a namespace may have.
func (c *cacheConfig) options(name string) (o cache.NamespaceOptions) {
	for _, s := range c.Namespaces {
		if s.Name == name || s.Name == "*" {
			flow, _ := cache.ParseFlow(s.Flow) // checked
			o = cache.NamespaceOptions{Priority: s.Priority, Flow: flow, TTL: time.Duration(s.TTL),
				Quota:   [2]uint64{uint64(s.MemoryQuota), uint64(s.DiskQuota)},
				HoldMax: uint64(s.HoldMax), BytesASecond: uint64(s.BytesASecond)}
		}
		if s.Name == name {
			break
		}
	}
	return o
}

// defaultSocket is where a server and its clients meet unless they are told.
func defaultSocket() string {
	dir := os.Getenv("XDG_RUNTIME_DIR")
	switch {
	case os.Geteuid() == 0:
		dir = "/run"
	case dir == "":
		dir = os.TempDir()
	}
	return filepath.Join(dir, "sluice-cache.sock")
}
