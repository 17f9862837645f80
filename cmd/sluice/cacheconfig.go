// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"

	"github.com/sluicehq/sluice/engine"
	"github.com/sluicehq/sluice/identity"
	"github.com/sluicehq/sluice/internal/figures"
	"github.com/sluicehq/sluice/kv/cache"
	"github.com/sluicehq/sluice/kv/cache/serve"
	"github.com/sluicehq/sluice/kv/directory"
	"github.com/sluicehq/sluice/kv/directory/etcd"
	"github.com/sluicehq/sluice/kv/seal"
)

// cacheConfig is the content of the config file of sluice cache serve. docs/cache.md has its keys.
type cacheConfig struct {
	name, socket, metrics      string
	listen, backends           []string
	plaintext                  bool
	startTimeout, drainTimeout time.Duration
	identity                   struct{ certificate, key, authority, revoked string }
	schedule                   engine.Schedule
	unscheduled                bool
	cache                      cache.Config // without its engine
	events                     struct {
		address, replay, topic string
		buffer                 uint64
	}
	namespaces []cacheNamespace
	object     objectConfig
	cluster    struct {
		etcd, addresses     []string
		prefix, certificate string
		lease               time.Duration
		weight              int // below 0: not said, so it follows from the memory
		bytesASecond        uint64

		etcdCertificate, etcdKey, etcdAuthority string
		identity                                *identity.Identity // of those files
	}
	seal string             // file of keys
	own  *identity.Identity // of the engine

	path, text string // of the file
}

// cacheNamespace is a [[namespace]]; the one of name "*" is for all that no other one names.
type cacheNamespace struct {
	name    string
	options cache.NamespaceOptions
	access  serve.Access
	salt    string // file
}

// setting is a key of a table, and where its value goes.
type setting struct {
	key         string
	to          any    // a pointer, or a func(string) error
	least, most uint64 // numbers, bytes of a text, or nanoseconds
}

const (
	unbounded = math.MaxInt64
	blocksAll = 900 << 20 // that a cache or a disk can know
	tierMax   = 16 << 40
	longest   = 2 << 30
	wantPath  = "want a path from the root on, such as \"/dev/shm/kv\""
)

// settings are the keys of a table; nth counts tables of one name from 0.
func (c *cacheConfig) settings(table string, nth int) []setting {
	switch k := &c.cache; table {
	case "identity":
		id := &c.identity
		return []setting{{"certificate", &id.certificate, 1, 4096}, {"key", &id.key, 1, 4096},
			{"authority", &id.authority, 1, 4096}, {"revoked", &id.revoked, 1, 4096}}
	case "cluster":
		k := &c.cluster
		return []setting{{"etcd", &k.etcd, 0, 0}, {"prefix", &k.prefix, 1, 255},
			{"addresses", &k.addresses, 0, 0}, {"certificate", &k.certificate, 1, 255},
			{"etcd_certificate", &k.etcdCertificate, 1, 4096}, {"etcd_key", &k.etcdKey, 1, 4096},
			{"etcd_authority", &k.etcdAuthority, 1, 4096},
			{"lease", &k.lease, 5e9, 3600e9}, {"weight", &k.weight, 0, 1 << 31},
			{"bytes_a_second", &k.bytesASecond, 1, unbounded}}
	case "object":
		b, t := &c.object.bucket, &c.object.tier
		return []setting{{"bucket", &b.Bucket, 3, 63}, {"endpoint", &b.Endpoint, 1, 4096},
			{"region", &b.Region, 1, 255}, {"path_style", &b.PathStyle, 0, 0},
			{"prefix", &t.Prefix, 1, 512}, {"bytes", &t.Bytes, 1, 1 << 60},
			{"blocks", &t.Blocks, 1, blocksAll}, {"pack_bytes", &t.PackBytes, 4096, 64 << 20},
			{"bytes_a_second", &t.BytesASecond, 1, unbounded}, {"ttl", &t.TTL, 1e9, unbounded},
			{"timeout", &t.Timeout, 1e6, 3600e9}}
	case "events":
		e := &c.events
		return []setting{{"address", &e.address, 1, 255}, {"replay", &e.replay, 1, 255},
			{"topic", &e.topic, 1, 255}, {"buffer", &e.buffer, 1, tierMax}}
	case "schedule":
		s := &c.schedule
		return []setting{{"off", &c.unscheduled, 0, 0},
			{"bytes_in_flight", &s.BytesInFlight, 1, 1 << 40},
			{"piece_bytes", &s.PieceBytes, 1, 64 << 20}, {"prefetch", &s.Prefetch, 1, 1 << 20},
			{"swap_out", &s.SwapOut, 1, 1 << 20}, {"queued_max", &s.QueuedMax, 1, 1 << 20}}
	case "memory":
		return []setting{{"path", &k.Memory.Path, 1, 4096},
			{"bytes", &k.Memory.Bytes, 4096, tierMax}, {"extent", &k.Memory.Extent, 1, longest}}
	case "disk":
		k.Disks = append(k.Disks, cache.DiskConfig{})
		d := &k.Disks[nth]
		return []setting{{"path", &d.Path, 1, 4096}, {"bytes", &d.Bytes, 4096, tierMax},
			{"extent", &d.Extent, 1, longest}, {"blocks", &d.Blocks, 1, blocksAll},
			{"bytes_a_day", &d.BytesADay, 1, unbounded}, {"durable", &d.Durable, 0, 0},
			{"slow_after", &d.SlowAfter, 1e6, unbounded}}
	case "namespace":
		c.namespaces = append(c.namespaces, cacheNamespace{})
		n := &c.namespaces[nth]
		o := &n.options
		flow := func(text string) (err error) { o.Flow, err = cache.ParseFlow(text); return err }
		return []setting{{"name", &n.name, 1, 255}, {"priority", &o.Priority, 0, 7},
			{"memory_quota", &o.Quota[0], 1, tierMax},
			{"disk_quota", &o.Quota[1], 1, unbounded},
			{"flow", flow, 0, 0}, {"ttl", &o.TTL, 1e9, unbounded},
			{"hold_max", &o.HoldMax, 1, tierMax},
			{"bytes_a_second", &o.BytesASecond, 1, unbounded},
			{"readers", &n.access.Readers, 0, 0}, {"writers", &n.access.Writers, 0, 0},
			{"salt", &n.salt, 1, 4096}}
	default:
		return []setting{{"name", &c.name, 1, 255}, {"socket", &c.socket, 1, 107},
			{"metrics", &c.metrics, 1, 255}, {"listen", &c.listen, 0, 0},
			{"backends", &c.backends, 0, 0}, {"plaintext", &c.plaintext, 0, 0},
			{"start_timeout", &c.startTimeout, 1e6, unbounded},
			{"drain_timeout", &c.drainTimeout, 1e6, unbounded},
			{"policy", (*string)(&k.Policy), 1, 255}, {"seal", &c.seal, 1, 4096},
			{"blocks", &k.Blocks, 1, blocksAll}, {"verify_first", &k.VerifyFirst, 0, 0},
			{"compare_known", &k.CompareKnown, 0, 0},
			{"operations", &k.OpsMax, 1, 1 << 20}, {"hold_max", &k.HoldMax, 1, tierMax}}
	}
}

// checkPolicy refuses what is no policy of a cache.
func checkPolicy(text string) error {
	return cache.Config{Policy: cache.Policy(text),
		Memory: cache.MemoryConfig{Path: "/", Bytes: 1 << 30}}.Check()
}

// set takes a value of TOML.
func (s *setting) set(v any) error {
	text, isText := v.(string)
	fits := func(n uint64) bool { return n >= s.least && n <= s.most }
	ok, want := false, ""
	switch to := s.to.(type) {
	case *bool:
		*to, ok = v.(bool)
		want = "true or false"
	case func(string) error:
		if isText {
			return to(text)
		}
		want = "a text"
	case *string:
		*to, ok = text, isText && fits(uint64(len(text)))
		want = fmt.Sprintf("a text of %d to %d bytes", s.least, s.most)
	case *[]string:
		list, _ := v.([]any)
		ok, want = len(list) > 0, "a list of texts, such as [\"a\", \"b\"]"
		for _, v := range list {
			text, isText := v.(string)
			*to, ok = append(*to, text), ok && isText
		}
	case *time.Duration:
		d, err := time.ParseDuration(text)
		*to, ok = d, err == nil && d > 0 && fits(uint64(d))
		want = fmt.Sprintf("a time such as \"500ms\" or \"30s\", at least %v",
			time.Duration(s.least))
	default:
		n, isNumber := v.(int64)
		u := uint64(n)
		if isText {
			var err error
			if u, err = figures.ParseSize(text); err != nil {
				return err
			}
		}
		ok = (isText || isNumber && n >= 0) && fits(u)
		want = fmt.Sprintf("a whole number from %d to %d", s.least, s.most)
		if s.most >= longest {
			want = fmt.Sprintf("a whole number, or a size such as \"64GiB\", from %s to %s",
				figures.FormatSize(s.least), figures.FormatSize(s.most))
		}
		if s.most == unbounded {
			want = "a whole number, or a size such as \"64GiB\"; without the key nothing bounds it"
		}
		switch to := to.(type) {
		case *int:
			*to = int(u)
		case *uint64:
			*to = u
		}
	}
	if !ok {
		return fmt.Errorf("%v: want %s", v, want)
	}
	return nil
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
	return parseCacheConfig(path, text)
}

// parseCacheConfig is readCacheConfig of a text; path is for errors.
func parseCacheConfig(path string, text []byte) (*cacheConfig, error) {
	var keys map[string]any
	if err := toml.Unmarshal(text, &keys); err != nil {
		if wrong, ok := errors.AsType[*toml.DecodeError](err); ok {
			line, _ := wrong.Position()
			path += fmt.Sprintf(", line %d", line)
		}
		return nil, fmt.Errorf("%s: %s", path, strings.TrimPrefix(err.Error(), "toml: "))
	}
	host, _ := os.Hostname()
	c := &cacheConfig{path: path, text: string(text), name: host, socket: defaultSocket(),
		startTimeout: 30 * time.Second, drainTimeout: 30 * time.Second}
	c.cluster.weight = -1
	for _, table := range []string{"identity", "schedule", "events", "cluster", "object", "memory",
		"disk", "namespace"} {
		list, form := []any{keys[table]}, "["+table+"]"
		switch many, isMany := keys[table].([]any); {
		case keys[table] == nil:
			continue
		case table == "disk" || table == "namespace":
			list, form = many, "["+form+"]"
		case isMany:
			list = nil
		}
		for nth, t := range list {
			keys, ok := t.(map[string]any)
			if !ok || len(keys) == 0 {
				list = nil
			} else if err := c.read(table, nth, keys); err != nil {
				return nil, err
			}
		}
		if len(list) == 0 {
			err := c.wrong("", 0, table, "want keys under a line %s", form)
			if _, isTable := keys[table].(map[string]any); isTable {
				err = c.wrong(table, 0, "", "want keys under a line %s", form)
			}
			return nil, err
		}
		delete(keys, table)
	}
	return c, cmp.Or(c.read("", 0, keys), c.check())
}

// read takes the keys of a table.
func (c *cacheConfig) read(table string, nth int, keys map[string]any) error {
	settings := c.settings(table, nth)
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		k := slices.IndexFunc(settings, func(s setting) bool { return s.key == key })
		if k < 0 {
			return c.wrong(table, nth, key, "there is no such key; docs/cache.md has those that "+
				"there are")
		}
		if err := settings[k].set(keys[key]); err != nil {
			return c.wrong(table, nth, key, "%w", err)
		}
	}
	return nil
}

// wrong returns an error about a key of a table. Of several tables of that name nth is the number,
// from 0. The error names the line of the key or, where the table lacks it or key is "", of the
// table.
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
	where := c.path
	if line > 0 {
		where += fmt.Sprintf(", line %d", line)
	}
	return fmt.Errorf("%s: %s: %w", where, cmp.Or(strings.Trim(table+"."+key, "."), "config"),
		fmt.Errorf(format, args...))
}

// check refuses values that do not go together.
func (c *cacheConfig) check() (err error) {
	refuse := func(bad bool, table string, nth int, key, format string, args ...any) {
		if bad && err == nil {
			err = c.wrong(table, nth, key, format, args...)
		}
	}
	id, m, disks := &c.identity, &c.cache.Memory, c.cache.Disks
	secure := id.certificate != "" && id.key != "" && id.authority != ""
	refuse(!secure && *id != (cacheConfig{}).identity, "identity", 0, "",
		"an identity has certificate, key and authority")
	refuse(secure && c.plaintext, "", 0, "plaintext", "with an identity nothing is in plain text")
	refuse(len(c.listen) > 0 && !secure && !c.plaintext, "", 0, "listen",
		"name the files of an [identity], or set plaintext = true on a network that is trusted")
	address := func(table, key, text string) {
		_, port, bad := net.SplitHostPort(text)
		if _, wrong := strconv.ParseUint(port, 10, 16); bad == nil {
			bad = wrong
		}
		refuse(bad != nil, table, 0, key, "%q is no HOST:PORT", text)
	}
	for _, text := range c.listen {
		address("", "listen", text)
	}
	if c.metrics != "" {
		address("", "metrics", c.metrics)
	}
	if ev := c.events; ev != (cacheConfig{}).events {
		address("events", "address", ev.address)
		if ev.replay != "" {
			address("events", "replay", ev.replay)
		}
	}
	if k := c.cluster; len(k.etcd)+len(k.addresses)+len(k.prefix)+len(k.certificate) > 0 ||
		k.lease > 0 || k.weight >= 0 || k.bytesASecond > 0 {
		bad := etcd.Config{Endpoints: k.etcd, Prefix: k.prefix, Lease: k.lease}.Check()
		refuse(bad != nil, "cluster", 0, "etcd", "%w", bad)
		n := directory.Node{Name: c.name, Addresses: k.addresses}
		if k.addresses == nil { // socket and listen
			n.Addresses = slices.Repeat([]string{"unix:/"}, 1+len(c.listen))
		}
		bad = n.Check()
		refuse(bad != nil, "cluster", 0, "addresses", "%w", bad)
	}
	if c.object != (objectConfig{}) {
		c.object.complete(c.name)
		refuse(c.object.tier.Bytes == 0, "object", 0, "bytes",
			"say how much the bucket may hold for this node, such as \"10TiB\"")
		bad := c.object.check()
		refuse(bad != nil, "object", 0, "", "%w", bad)
	}
	for _, text := range c.backends {
		var spec backendSpec
		bad := spec.Set(text)
		refuse(bad != nil, "", 0, "backends", "%w", bad)
		refuse(spec.name == auto, "", 0, "backends", "name each one: auto is of the command line")
	}
	onDisks := func(spec string) bool { return strings.HasPrefix(spec+":", "posix:") }
	refuse(disks != nil && c.backends != nil && !slices.ContainsFunc(c.backends, onDisks), "", 0,
		"backends", "a [[disk]] takes posix, too")
	refuse(c.schedule.PieceBytes > cmp.Or(c.schedule.BytesInFlight, 2<<20), "schedule", 0,
		"piece_bytes", "want at most bytes_in_flight, by default 2 MiB")
	bad := checkPolicy(string(c.cache.Policy))
	refuse(bad != nil, "", 0, "policy", "%w", bad)
	refuse(!filepath.IsAbs(m.Path), "memory", 0, "path", wantPath)
	refuse(m.Bytes < cmp.Or(m.Extent, 2<<20), "memory", 0, "bytes",
		"want at least an extent, by default 2 MiB")
	refuse(c.cache.HoldMax > m.Bytes, "", 0, "hold_max", "want at most the bytes of [memory]")
	for n := range disks {
		refuse(!filepath.IsAbs(disks[n].Path), "disk", n, "path", wantPath)
		refuse(disks[n].Bytes < cmp.Or(disks[n].Extent, m.Extent, 2<<20), "disk", n, "bytes",
			"want at least an extent, by default that of [memory]")
		bad = cache.Config{Memory: *m, Disks: disks[:n+1]}.Check()
		refuse(bad != nil, "disk", n, "", "%w", bad)
	}
	for n, s := range c.namespaces {
		o, bad := s.options, s.options.Check()
		same := func(o cacheNamespace) bool { return o.name == s.name }
		refuse(s.name == "", "namespace", n, "name", "want a name, or \"*\" for all others")
		refuse(slices.ContainsFunc(c.namespaces[:n], same), "namespace", n, "name",
			"%q is there twice", s.name)
		refuse(o.TTL%time.Second != 0, "namespace", n, "ttl", "want whole seconds, as in \"60s\"")
		refuse(o.Quota[0] > m.Bytes, "namespace", n, "memory_quota",
			"want at most the bytes of [memory]")
		refuse(o.HoldMax > m.Bytes, "namespace", n, "hold_max",
			"want at most the bytes of [memory]")
		refuse(o.Quota[1] > 0 && disks == nil, "namespace", n, "disk_quota", "there is no [[disk]]")
		refuse(o.Flow == cache.WriteBack && disks == nil, "namespace", n, "flow",
			"there is no [[disk]] to write to")
		refuse(bad != nil, "namespace", n, "", "%w", bad)
	}
	c.checkSecure(refuse)
	whole := c.cache
	if c.seal != "" {
		whole.Seal = &seal.Keys{} // for what it adds to a block; readSecrets reads them
	}
	bad = whole.Check()
	refuse(bad != nil, "memory", 0, "", "%w", bad)
	return err
}

// names reports whether a [[namespace]] has a name.
func (c *cacheConfig) names(name string) bool {
	return slices.ContainsFunc(c.namespaces, func(s cacheNamespace) bool { return s.name == name })
}

// options returns the options of a namespace.
func (c *cacheConfig) options(name string) (o cache.NamespaceOptions) {
	for _, s := range c.namespaces {
		if s.name == name {
			return s.options
		}
		if s.name == "*" {
			o = s.options
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
