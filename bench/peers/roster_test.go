// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestRosterOfEachLane(t *testing.T) {
	list := Participants(Where{Bin: "bin", Scripts: "scripts", Files: "disk",
		Python: func(peer string) string {
			return peer + "/python"
		}})
	names := map[Lane][]string{}
	for _, p := range list {
		if slices.Contains(names[p.Lane], p.Name) {
			t.Errorf("%s is twice on lane %s", p.Name, p.Lane)
		}
		names[p.Lane] = append(names[p.Lane], p.Name)
		if p.Ours != strings.HasPrefix(p.Name, "sluice-") ||
			p.Scripted != strings.HasSuffix(p.Command[0], "python") {
			t.Errorf("%+v", p)
		}
		if file := p.Lane == File; file != slices.Equal(p.Target, []string{"bin/file", "disk"}) ||
			(p.Needs != nil) != (p.Lane == RDMA) {
			t.Errorf("%+v", p)
		}
		if script := filepath.Join("drivers",
			filepath.Base(p.Command[len(p.Command)-1])); strings.HasSuffix(script, ".py") {
			if _, err := os.Stat(script); err != nil {
				t.Error(err)
			}
		}
	}
	for lane, want := range map[Lane][]string{
		Host: {"sluice-shm", "sluice-python", "sluice-nixl", "nixl", "mooncake", "ucx_perftest"},
		TCP:  {"sluice-tcp", "nixl-polled", "mooncake"},
		RDMA: {"sluice-rdma", "nixl", "perftest"},
		File: {"sluice-posix", "nixl", "nixl-uring", "sluice-nixl", "fio"},
	} {
		for _, name := range want {
			if !slices.Contains(names[lane], name) {
				t.Errorf("lane %s has %v, and not %s", lane, names[lane], name)
			}
		}
	}
	if len(names) != len(Lanes) {
		t.Errorf("lanes %v", names)
	}
}

func TestWithoutAnRDMADeviceIsARow(t *testing.T) {
	dir := t.TempDir()
	p := fake(t, "theirs", "good", RDMA)
	p.Needs = func() error { return needsDevice(dir) }
	if _, err := OpenPair(context.Background(), p, 1<<20); !errors.Is(err, ErrUnsupported) ||
		!strings.Contains(err.Error(), "make bench-rdma") {
		t.Errorf("without a device: %v", err)
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "mlx5_0"), nil, 0o600))
	pair, err := OpenPair(context.Background(), p, 1<<20)
	require.NoError(t, err, "with a device")
	pair.Close()
}
