// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Lane is the way by which bytes move between the two memories.
type Lane string

// The lanes.
const (
	Process Lane = "process" // two memories of one process
	Host    Lane = "host"    // two processes of one host, by the means that an engine chooses
	TCP     Lane = "tcp"     // sockets over the loopback interface
	RDMA    Lane = "rdma"    // verbs, from a device of this host to itself
	File    Lane = "file"    // a process and a regular file
	Weights Lane = "weights" // safetensors files into memory
	GPU     Lane = "gpu"     // a card's memory and the host's
	GPUFile Lane = "gpufile" // a card's memory and a file

	// a cache of KV blocks, which another process of the host has, and this one uses by shared
	// memory; the same over the loopback interface; a cache of this process with a disk
	CacheShm  Lane = "cache-shm"
	CacheTCP  Lane = "cache-tcp"
	CacheDisk Lane = "cache-disk"
)

// CacheLanes are the lanes that measure a cache.
var CacheLanes = []Lane{CacheShm, CacheTCP, CacheDisk}

// Lanes are all lanes, in the order of tables.
var Lanes = []Lane{Process, Host, TCP, RDMA, File, Weights, GPU, GPUFile, CacheShm, CacheTCP,
	CacheDisk}

// laneBackends lists sluice's backends for each lane. The first is measured by default.
var laneBackends = map[Lane][]string{
	Process: {"mem"}, Host: {"shm"}, TCP: {"tcp", "ucx"}, RDMA: {"rdma"}, File: {"posix"},
	Weights: {"posix"}, GPU: {"cuda"}, GPUFile: {"gds"},
	CacheShm: {"shm"}, CacheTCP: {"tcp"}, CacheDisk: {"shm"},
}

// bare has, for a lane, the options of a backend that the user named without any: it then works as
// the other participants do, without encryption and over the loopback interface.
var bare = map[Lane]map[string]string{TCP: {"tcp": "tcp:listen=127.0.0.1:0,plaintext=true",
	"ucx": "ucx:transports=tcp,devices=lo"}}

// BackendsOf returns sluice's backends for a lane. The first is the default.
func BackendsOf(lane Lane) []string { return slices.Clone(laneBackends[lane]) }

// LaneOf returns the default lane of a backend, which may have options, as "tcp:listen=…".
func LaneOf(backend string) (Lane, error) {
	name, _, _ := strings.Cut(backend, ":")
	var known []string
	for _, lane := range Lanes {
		if slices.Contains(laneBackends[lane], name) {
			return lane, nil
		}
		for _, one := range laneBackends[lane] {
			if !slices.Contains(known, one) {
				known = append(known, one)
			}
		}
	}
	return "", fmt.Errorf("unknown backend %q: there are %s: %w", name, strings.Join(known, ", "),
		ErrShape)
}

// Setup says where the programs of the participants are, and with what settings they run.
type Setup struct {
	Sluice   string   // path of the sluice command, which has the drivers in Go
	Backends []string // sluice's backends, with options; nil: the lane's first
	Folder   string   // on the disk to measure
	// the folder of the drivers in Python, and the interpreter of each one's environment; nil: they
	// are left out
	Scripts string
	Python  func(peer string) string
}

// Participants returns all participants of a lane, sluice first. Some may be unable to run on this
// machine: see Participant.Needs and ErrUnsupported.
func Participants(lane Lane, s Setup) (list []Participant) {
	add := func(name string, words ...string) *Participant {
		list = append(list, Participant{Name: name, Lane: lane,
			Command: append([]string{s.Sluice, "bench", "driver"}, words...)})
		return &list[len(list)-1]
	}
	ours := func(name string, words ...string) *Participant {
		short, _, _ := strings.Cut(name, ":") // without options, if that is unique
		if !slices.ContainsFunc(list, func(p Participant) bool {
			return p.Name == "sluice-"+short
		}) {
			name = short
		}
		p := add("sluice-"+name, words...)
		p.Ours = true
		return p
	}
	// alone marks a participant of one process; yardstick adds a baseline.
	alone := func(p *Participant) *Participant {
		p.Alone = true
		return p
	}
	yardstick := func(name string, words ...string) *Participant {
		p := add(name, words...)
		p.Yardstick = true
		return p
	}
	// timed marks a program that measures itself, and blind one of one process. The harness cannot
	// check the bytes of either.
	timed := func(p *Participant) {
		p.Blind, p.Timed, p.Alone = true, true, p.Alone || lane == Weights
	}
	blind := func(p *Participant) { alone(p).Blind = true }
	redis := func(p *Participant) { p.Blind, p.Needs = true, needsRedis }
	script := func(name, peer, file string, env []string, args ...string) *Participant {
		if s.Python == nil {
			return &Participant{}
		}
		list = append(list, Participant{Name: name, Lane: lane, Env: env, Scripted: true,
			Ours:    peer == "sluice",
			Command: append([]string{s.Python(peer), filepath.Join(s.Scripts, file)}, args...)})
		return &list[len(list)-1]
	}
	nixl := func(env []string, args ...string) {
		script("nixl", "nixl", "nixl_agent.py", env, args...)
		script("nixl-polled", "nixl", "nixl_agent.py", env, append(args, "polled")...)
	}
	// faced is the driver for NIXL, run over sluice's implementation of NIXL's API: it shows what
	// users get when they switch.
	faced := func(args ...string) {
		if p := script("sluice-nixl", "sluice", "nixl_agent.py", nil, args...); s.Python != nil {
			p.Command = append([]string{p.Command[0], "-m", "sluice.nixl.shim"}, p.Command[1:]...)
		}
	}
	backends := s.Backends
	if backends == nil {
		backends = laneBackends[lane][:1]
	}
	// card returns backend cuda with the same libcuda as a backend gds.
	card := func(gds string) string {
		_, options, _ := strings.Cut(gds, ":")
		for option := range strings.SplitSeq(options, ",") {
			if path, ok := strings.CutPrefix(option, "cuda="); ok {
				return "cuda:library=" + path
			}
		}
		return "cuda"
	}
	for _, b := range backends {
		switch lane {
		case Process:
			alone(ours(b, "engine", b))
		case GPU:
			spec := b
			if !strings.Contains(b, "sms=") { // without it no kernel runs
				_, options, _ := strings.Cut(b, ":")
				spec = strings.TrimSuffix("cuda:sms=4,"+options, ",")
			}
			alone(ours(b, "engine", spec))
		case Weights:
			blind(ours("weights", "weights", s.Folder))
		case CacheShm, CacheTCP:
			if plain := bare[TCP][b]; plain != "" {
				b = plain
			}
			ours("cache", "cache", "each", b).Blind = true
			ours("cache-first", "cache", "first", b).Blind = true
			if lane == CacheShm {
				blind(ours("cache-own", "cache", "own", b))
			}
		case CacheDisk:
			blind(ours("cache", "cache", "dir="+s.Folder, b, "posix"))
		case GPUFile:
			alone(ours(b, "engine", b, card(b), "dir="+s.Folder, "only=gds"))
		default:
			spec := b
			if plain := bare[lane][b]; plain != "" {
				spec = plain
			}
			ours(b, "engine", spec)
		}
	}
	switch lane {
	case Process:
		blind(ours("sparse", "sparse"))
		alone(yardstick("memcpy", "memcpy"))
		alone(yardstick("memcpy-huge", "memcpy", "huge"))
	case Host:
		ours("foreign", "engine", backends[0], "foreign")
		script("sluice-python", "sluice", "sluice_engine.py", nil)
		faced()
		nixl(nil)
		script("mooncake", "mooncake", "mooncake_engine.py", nil)
		alone(yardstick("memcpy", "memcpy"))
		alone(yardstick("memcpy-huge", "memcpy", "huge"))
		yardstick("sockets", "sockets").Blind = true
		timed(yardstick("ucx_perftest", "perftest"))
	case TCP:
		ours("ucx-tcp", "engine", bare[TCP]["ucx"])
		nixl([]string{"UCX_TLS=tcp", "UCX_NET_DEVICES=lo"})
		script("mooncake", "mooncake", "mooncake_engine.py", nil)
		yardstick("sockets", "sockets").Blind = true
		timed(yardstick("ucx_perftest", "perftest"))
	case RDMA:
		nixl([]string{"UCX_TLS=rc,self"})
		timed(yardstick("perftest", "perftest"))
		for i := range list {
			list[i].Needs = func() error { return needsDevice(verbsDevices) }
		}
	case File:
		script("nixl", "nixl", "nixl_agent.py", nil, "file")
		script("nixl-uring", "nixl", "nixl_agent.py", nil, "file", "uring")
		faced("file")
		timed(yardstick("fio", "fio"))
		yardstick("pread", "pread")
		for i := range list {
			list[i].Target = []string{s.Sluice, "bench", "driver", "file", s.Folder}
		}
	case Weights:
		blind(yardstick("mmap", "weights-mmap", s.Folder))
		timed(yardstick("fio", "weights-fio", s.Folder))
	case GPU:
		alone(yardstick("copy-engine", "copy-engine", backends[0])).Blind = true
	case CacheShm:
		alone(yardstick("memcpy", "memcpy"))
		redis(yardstick("redis", "redis"))
	case CacheTCP:
		script("mooncake-store", "mooncake", "mooncake_store.py", nil).Blind = true
		yardstick("sockets", "sockets").Blind = true
		redis(yardstick("redis", "redis"))
	case CacheDisk:
		p := yardstick("fio", "fio")
		timed(p)
		p.Target = []string{s.Sluice, "bench", "driver", "file", s.Folder}
	case GPUFile:
		alone(yardstick("staged", "engine", card(backends[0]), "posix", "dir="+s.Folder,
			"only=staged"))
	}
	return list
}

// needsRedis returns nil if there is a server of Redis.
func needsRedis() error {
	if _, err := exec.LookPath("redis-server"); err != nil {
		return fmt.Errorf("redis-server is not installed: apt-get install redis-server: %w",
			ErrUnsupported)
	}
	return nil
}

// verbsDevices is the folder in which the kernel lists RDMA devices.
const verbsDevices = "/sys/class/infiniband"

// needsDevice returns nil if there is an RDMA device.
func needsDevice(folder string) error {
	if list, err := os.ReadDir(folder); err == nil && len(list) > 0 {
		return nil
	}
	return fmt.Errorf("no RDMA device in %s: make bench-rdma measures sluice beside perftest in "+
		"a guest with soft-RoCE: %w", folder, ErrUnsupported)
}
