// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package rdma

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/sluicehq/sluice/driver"
)

func TestConfig(t *testing.T) {
	for name, c := range map[string]Config{
		"rails": {Rails: 17}, "depth": {QueueDepth: 1}, "slice": {Slice: 100},
		"flight":  {Slice: 1 << 20, Flight: 1 << 19},
		"batches": {BatchesMax: 1000}, "notifications": {NotifyMax: -1}, "keys": {KeysMax: 1 << 30},
		"conns":            {ConnsMax: -1},
		"retries for ever": {Retries: 7}, "level": {Level: 16}, "class": {TrafficClass: 256},
		"mtu": {MTU: 1500}, "entries": {Entries: -1},
		"spin": {Spin: -1}, "packet life": {PacketLife: -1}, "timeout": {Timeout: time.Hour},
		"short timeout": {Timeout: time.Microsecond},
		"grace":         {Grace: time.Millisecond}, "failure": {Failure: time.Millisecond},
		"listen":  {Listen: "nowhere"},
		"devices": {Devices: "a:b"}, "twice": {Devices: "a,a"}, "empty": {Devices: "a,"},
	} {
		b, err := open(c, func(*Config) error { return nil }, nil)
		if !errors.Is(err, driver.ErrBounds) {
			t.Errorf("%s: %v, %v", name, b, err)
		}
	}
	for mtu, want := range map[int]uint8{0: 0, 256: 1, 1024: 3, 4096: 5} {
		if got, err := (&Config{MTU: mtu}).mtu(); err != nil || got != want {
			t.Errorf("MTU %d is %d, %v", mtu, got, err)
		}
	}
}

func TestFailureTime(t *testing.T) {
	for _, c := range []struct {
		timeout  time.Duration
		exponent uint8
	}{
		{4096 * time.Nanosecond, 0}, {4097 * time.Nanosecond, 1}, {67 * time.Millisecond, 14},
		{68 * time.Millisecond, 15},
		{0, 16}, {268435456 * time.Nanosecond, 16},
	} {
		cfg := Config{Timeout: c.timeout}
		cfg.EnsureDefaults()
		if got := cfg.timeoutExponent(); got != c.exponent {
			t.Errorf("%v is 4.096 us << %d, want %d", c.timeout, got, c.exponent)
		}
		if cfg.ackTimeout() < cfg.Timeout || cfg.ackTimeout() >= 2*cfg.Timeout {
			t.Errorf("%v becomes %v", cfg.Timeout, cfg.ackTimeout())
		}
	}
	least, most := Config{Timeout: 67 * time.Millisecond, Retries: 3}.FailureTime()
	if least != 4*(ackUnit<<14) || most != 4*least {
		t.Errorf("a queue pair fails after %v to %v", least, most)
	}
}

func TestSplitDevices(t *testing.T) {
	got, err := splitDevices("mlx5_0,mlx5_1:2,mlx5_2:1#3")
	want := []wanted{{"mlx5_0", 0, -1}, {"mlx5_1", 2, -1}, {"mlx5_2", 1, 3}}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	for i, text := range []string{"mlx5_0", "mlx5_1:2", "mlx5_2:1#3"} {
		if want[i].String() != text {
			t.Errorf("%v, want %s", want[i], text)
		}
	}
	for _, bad := range []string{"a:", "a:0", "a:256", "a:1#", "a:1#x", "a:1#256", "#1", ":1",
		"a b", "../a", "a.b", ","} {
		if got, err := splitDevices(bad); !errors.Is(err, driver.ErrBounds) {
			t.Errorf("%q is %v, %v", bad, got, err)
		}
	}
}

func TestChosenDevices(t *testing.T) {
	_, open := standIn(t, 2)
	var u *driver.UnavailableError
	for _, c := range []struct {
		cfg  Config
		want []string
	}{
		{Config{}, []string{"fake0:1", "fake1:1"}}, {Config{Rails: 1}, []string{"fake0:1"}},
		{Config{Devices: "fake1"}, []string{"fake1:1"}}, {Config{Devices: "fake1:1#1,fake0"},
			[]string{"fake1:1", "fake0:1"}},
		{Config{Devices: "fake2"}, nil}, {Config{Devices: "fake0:2"}, nil},
		{Config{Devices: "fake0:1#5"}, nil},
	} {
		b, err := open(c.cfg)
		if c.want == nil {
			if !errors.As(err, &u) || u.Fix == "" {
				t.Errorf("%q: %v", c.cfg.Devices, err)
			}
			continue
		}
		require.NoError(t, err)
		var got []string
		for _, r := range b.rails {
			got = append(got, r.String())
		}
		if err := b.Close(); err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%q of %d: rails %v, want %v (%v)", c.cfg.Devices, c.cfg.Rails, got, c.want,
				err)
		}
	}
}
