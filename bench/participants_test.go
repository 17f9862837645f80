// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParticipantsOfEachLane(t *testing.T) {
	all := Setup{Sluice: "sluice", Folder: "disk", Scripts: "scripts",
		Python: func(peer string) string {
			return peer + "/python"
		}}
	for lane, want := range map[Lane][]string{
		Process: {"sluice-mem", "sluice-sparse", "memcpy", "memcpy-huge"},
		Host: {"sluice-shm", "sluice-foreign", "sluice-python", "sluice-nixl", "nixl",
			"nixl-polled", "mooncake", "memcpy", "memcpy-huge", "sockets",
			"ucx_perftest"},
		TCP: {"sluice-tcp", "sluice-ucx-tcp", "nixl", "nixl-polled", "mooncake", "sockets",
			"ucx_perftest"},
		RDMA:    {"sluice-rdma", "nixl", "nixl-polled", "perftest"},
		File:    {"sluice-posix", "nixl", "nixl-uring", "sluice-nixl", "fio", "pread"},
		Weights: {"sluice-weights", "mmap", "fio"},
		GPU:     {"sluice-cuda", "copy-engine"},
		GPUFile: {"sluice-gds", "staged"},
		CacheShm: {"sluice-cache", "sluice-cache-first", "sluice-cache-own", "memcpy",
			"redis"},
		CacheTCP:  {"sluice-cache", "sluice-cache-first", "mooncake-store", "sockets", "redis"},
		CacheDisk: {"sluice-cache", "fio"},
	} {
		var names []string
		scripted := 0
		for _, p := range Participants(lane, all) {
			names = append(names, p.Name)
			if p.Ours != strings.HasPrefix(p.Name, "sluice-") || p.Lane != lane ||
				p.Scripted != strings.HasSuffix(p.Command[0], "python") ||
				!p.Scripted && p.Command[2] != "driver" || p.Timed && !p.Blind ||
				(p.Target != nil) != (lane == File || lane == CacheDisk && p.Name == "fio") ||
				(p.Needs != nil) != (lane == RDMA || p.Name == "redis") {
				t.Errorf("%+v", p)
			}
			if !p.Scripted {
				continue
			}
			scripted++
			for _, word := range p.Command {
				if strings.HasSuffix(word, ".py") {
					_, err := os.Stat(filepath.Join("drivers", filepath.Base(word)))
					require.NoError(t, err)
				}
			}
		}
		require.Equal(t, want, names)
		without := all
		without.Python = nil
		if list := Participants(lane, without); len(list) != len(want)-scripted ||
			!list[0].Ours || !list[len(list)-1].Yardstick {
			t.Errorf("lane %s without Python has %+v", lane, list)
		}
		if laneBackends[lane] == nil || !slices.Contains(runOrder, lane) ||
			!slices.Contains(Lanes, lane) {
			t.Errorf("lane %s is not in all tables", lane)
		}
	}
	two := Participants(TCP, Setup{Sluice: "sluice", Backends: []string{"ucx:workers=1",
		"ucx:workers=2"}})
	if two[0].Name != "sluice-ucx" || two[1].Name != "sluice-ucx:workers=2" ||
		!slices.Contains(two[1].Command, "ucx:workers=2") {
		t.Errorf("%+v", two[:2])
	}
}

func TestLaneOfABackend(t *testing.T) {
	for backend, want := range map[string]Lane{"mem": Process, "shm:workers=2": Host, "tcp": TCP,
		"ucx": TCP, "rdma:devices=a,b": RDMA, "posix": File, "cuda": GPU, "gds": GPUFile} {
		if lane, err := LaneOf(backend); err != nil || lane != want {
			t.Errorf("%s: lane %s, %v", backend, lane, err)
		}
	}
	if _, err := LaneOf("smoke"); !errors.Is(err, ErrShape) ||
		!strings.Contains(err.Error(), "mem, shm, tcp, ucx, rdma, posix") {
		t.Error(err)
	}
}
