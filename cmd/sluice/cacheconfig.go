// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"

	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/kv/cache"
)

// cacheConfig is the file of sluice cache serve. docs/cache.md has the fields.
type cacheConfig struct {
	Name     string   `toml:"name"`
	Socket   string   `toml:"socket"`
	Listen   []string `toml:"listen"`
	Backends []string `toml:"backends"`
	Metrics  string   `toml:"metrics"`

	Identity struct {
		Certificate string `toml:"certificate"`
		Key         string `toml:"key"`
		Authority   string `toml:"authority"`
		Revoked     string `toml:"revoked"`
	} `toml:"identity"`
	Plaintext     bool `toml:"plaintext"`
	InspectRemote bool `toml:"inspect_remote"`

	StartTimeout duration `toml:"start_timeout"`
	DrainTimeout duration `toml:"drain_timeout"`

	Policy      cache.Policy `toml:"policy"`
	Blocks      uint64       `toml:"blocks"`
	VerifyFirst bool         `toml:"verify_first"`
	Operations  int          `toml:"operations"`
	HoldMax     size         `toml:"hold_max"`

	Memory     cacheMemory      `toml:"memory"`
	Disks      []cacheDisk      `toml:"disk"`
	Namespaces []cacheNamespace `toml:"namespace"`

	text string // of the file
	path string
}

type cacheMemory struct {
	Path   string `toml:"path"`
	Bytes  size   `toml:"bytes"`
	Extent size   `toml:"extent"`
}

type cacheDisk struct {
	Path      string `toml:"path"`
	Bytes     size   `toml:"bytes"`
	Extent    size   `toml:"extent"`
	Blocks    uint64 `toml:"blocks"`
	BytesADay size   `toml:"bytes_a_day"`
	Durable   bool   `toml:"durable"`
}

// cacheNamespace is what namespaces of a name may have.
type cacheNamespace struct {
	Name        string   `toml:"name"` // "*": those that no other entry names
	Priority    int      `toml:"priority"`
	MemoryQuota size     `toml:"memory_quota"`
	DiskQuota   size     `toml:"disk_quota"`
	Flow        string   `toml:"flow"`
	TTL         duration `toml:"ttl"`
	HoldMax     size     `toml:"hold_max"`
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
type configError struct {
	path string
	line int
	key  string
	err  error
}

func (e *configError) Error() string {
	where := e.path
	if e.line > 0 {
		where += fmt.Sprintf(", line %d", e.line)
	}
	if e.key != "" {
		where += ": " + e.key
	}
	return fmt.Sprintf("%s: %v", where, e.err)
}

func (e *configError) Unwrap() error { return e.err }

// configMax bounds the file.
const configMax = 1 << 20

// readCacheConfig reads a config, puts the defaults in, and checks all that can be checked without
// opening anything.
func readCacheConfig(path string) (*cacheConfig, error) {
	info, err := os.Stat(path)
	if err == nil && (!info.Mode().IsRegular() || info.Size() > configMax) {
		err = fmt.Errorf("%s is no file of at most %d bytes", path, configMax)
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
	err = d.Decode(c)
	switch {
	case errors.As(err, &unknown):
		e := unknown.Errors[0]
		line, _ := e.Position()
		return nil, &configError{path, line, strings.Join(e.Key(), "."),
			errors.New("there is no such key; docs/cache.md has those that there are")}
	case errors.As(err, &wrong):
		line, _ := wrong.Position()
		text := strings.TrimPrefix(wrong.Error(), "toml: ")
		if before, _, ok := strings.Cut(text, " into struct field"); ok { // of a Go type
			text = before + ": it wants a value of another type"
		}
		text, _, _ = strings.Cut(text, " cannot be stored in main.")
		return nil, &configError{path, line, strings.Join(wrong.Key(), "."), errors.New(text)}
	case err != nil:
		return nil, &configError{path: path, err: err}
	}
	if err := c.check(); err != nil {
		return nil, err
	}
	return c, nil
}

// wrong is an error about a key of a table, of which there may be several; nth counts them from 0.
func (c *cacheConfig) wrong(table string, nth int, key, format string, args ...any) error {
	e := &configError{path: c.path, key: key, err: fmt.Errorf(format, args...)}
	if table != "" {
		e.key = table + "." + key
	}
	at := ""
	for n, line := range strings.Split(c.text, "\n") {
		line, _, _ = strings.Cut(line, "#")
		if line = strings.TrimSpace(line); strings.HasPrefix(line, "[") {
			if at == table {
				nth--
			}
			if at = strings.Trim(line, "[] \t"); at == table && nth == 0 && table != "" {
				e.line = n + 1 // of the table, where it does not have the key
			}
			continue
		}
		name, _, _ := strings.Cut(line, "=")
		if at == table && nth == 0 && strings.TrimSpace(name) == key {
			e.line = n + 1
			break
		}
	}
	return e
}

// socketPathMax is what the kernel takes.
const socketPathMax = 107

func (c *cacheConfig) check() error {
	switch {
	case c.Memory.Path == "":
		return c.wrong("memory", 0, "path", "name the file in memory, such as /dev/shm/kv")
	case c.Memory.Bytes == 0:
		return c.wrong("memory", 0, "bytes", "say how much it may have, such as \"64GiB\"")
	case c.Name == "" || len(c.Name) > 255:
		return c.wrong("", 0, "name", "want from 1 to 255 bytes")
	case c.Socket == "" || len(c.Socket) > socketPathMax:
		return c.wrong("", 0, "socket", "want a path of 1 to %d bytes", socketPathMax)
	case c.Operations < 0:
		return c.wrong("", 0, "operations", "want at least 1, or 0 for the default")
	}
	secure := 0
	for key, file := range map[string]string{"certificate": c.Identity.Certificate,
		"key": c.Identity.Key, "authority": c.Identity.Authority} {
		if file != "" {
			secure++
		} else if c.Identity != (cacheConfig{}).Identity {
			return c.wrong("identity", 0, key, "an identity has certificate, key and authority")
		}
	}
	switch {
	case secure > 0 && c.Plaintext:
		return c.wrong("", 0, "plaintext", "with an identity nothing is in plain text")
	case len(c.Listen) > 0 && secure == 0 && !c.Plaintext:
		return c.wrong("", 0, "listen", "name the files of an [identity], or set plaintext = "+
			"true on a network that is trusted")
	}
	for _, address := range c.Listen {
		if _, _, err := net.SplitHostPort(address); err != nil {
			return c.wrong("", 0, "listen", "%q is no HOST:PORT", address)
		}
	}
	if c.Metrics != "" {
		if _, _, err := net.SplitHostPort(c.Metrics); err != nil {
			return c.wrong("", 0, "metrics", "%q is no HOST:PORT", c.Metrics)
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
	for n := range c.Disks {
		switch d := &c.Disks[n]; {
		case d.Path == "":
			return c.wrong("disk", n, "path", "name the file on the disk")
		case d.Bytes == 0:
			return c.wrong("disk", n, "bytes", "say how much it may have, such as \"1TiB\"")
		}
	}
	names := map[string]bool{}
	for n, s := range c.Namespaces {
		switch {
		case s.Name == "":
			return c.wrong("namespace", n, "name", "want a name, or \"*\" for all others")
		case names[s.Name]:
			return c.wrong("namespace", n, "name", "%q is there twice", s.Name)
		case s.Priority < 0 || s.Priority > 7:
			return c.wrong("namespace", n, "priority", "%d: want 0, the first to go, to 7",
				s.Priority)
		case s.TTL%duration(time.Second) != 0:
			return c.wrong("namespace", n, "ttl", "%v: want whole seconds", time.Duration(s.TTL))
		}
		if _, err := cache.ParseFlow(s.Flow); err != nil {
			return c.wrong("namespace", n, "flow", "%w", err)
		}
		names[s.Name] = true
	}
	cfg := c.cache()
	if err := cfg.Check(); err != nil {
		return &configError{path: c.path, err: err}
	}
	return nil
}

// cache is the config of the cache itself, without its engine.
func (c *cacheConfig) cache() cache.Config {
	cfg := cache.Config{Policy: c.Policy, Blocks: c.Blocks, VerifyFirst: c.VerifyFirst,
		OpsMax: c.Operations, HoldMax: uint64(c.HoldMax),
		Memory: cache.MemoryConfig{Path: c.Memory.Path, Bytes: uint64(c.Memory.Bytes),
			Extent: uint64(c.Memory.Extent)}}
	for _, d := range c.Disks {
		cfg.Disks = append(cfg.Disks, cache.DiskConfig{Path: d.Path, Bytes: uint64(d.Bytes),
			Extent: uint64(d.Extent), Blocks: d.Blocks, BytesADay: uint64(d.BytesADay),
			Durable: d.Durable})
	}
	return cfg
}

// options are what a namespace may have.
func (c *cacheConfig) options(name string) (o cache.NamespaceOptions) {
	for _, s := range c.Namespaces {
		if s.Name == name || s.Name == "*" {
			flow, _ := cache.ParseFlow(s.Flow) // checked
			o = cache.NamespaceOptions{Priority: s.Priority, Flow: flow, TTL: time.Duration(s.TTL),
				Quota:   [2]uint64{uint64(s.MemoryQuota), uint64(s.DiskQuota)},
				HoldMax: uint64(s.HoldMax)}
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
