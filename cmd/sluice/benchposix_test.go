// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"strings"
	"testing"
)

func TestBenchPosix(t *testing.T) {
	dir := t.TempDir()
	o := withoutPrograms(t, "bench", "posix", "--dir", dir, "--bytes", "8MiB", "--size", "16KiB",
		"--batch", "4", "--seconds", "0.02", "--rounds", "1", "--json")
	if o.status != 0 {
		t.Fatalf("%+v", o)
	}
	r := decode(t, o.stdout).([]any)[0].(map[string]any)
	if r["backend"] != "posix" || r["gbps"].(float64) <= 0 || r["route"] == "" {
		t.Errorf("%v", r)
	}
	o = withoutPrograms(t, "bench", "posix", "--dir", dir, "--bytes", "8MiB", "--seconds", "0.005",
		"--rounds", "1", "--load-bytes", "16MiB")
	if o.status != 0 || strings.Count(o.stdout, "posix-threads") < len(posixTable(1)) ||
		!strings.Contains(o.stdout, "read pages") ||
		!strings.Contains(o.stdout, "posix durable") || !strings.Contains(o.stdout, "mmap-copy") {
		t.Errorf("the table: %+v", o)
	}
	o = sluice(t, "bench", "posix", "--dir", dir, "--load", "--load-bytes", "16MiB", "--rounds",
		"1", "--json")
	r = decode(t, o.stdout).([]any)[0].(map[string]any)
	if o.status != 0 || r["op"] != "load" || r["gbps"].(float64) <= 0 {
		t.Errorf("%+v", o)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	for _, args := range [][]string{{"--op", "append"}, {"--pages", "--op", "write"},
		{"--size", "0"}, {"--size", "much"}, {"--dense", "8", "--op", "read"},
		{"--durable", "--op", "read"}, {"--load-bytes", "x"},
		{"--dense", "8"}, {"--durable"}, {"--load", "--durable"},
		{"--pages", "--dense", "8", "--size", "4096", "--batch", "2048", "--bytes", "8MiB"},
		{"--bytes", "8KiB", "--size", "1MiB"},
		{"--batch", "0"}, {"--seconds", "0"}, {"--rounds", "0"}, {"--format", "xml"}} {
		if o := sluice(t, append([]string{"bench", "posix", "--dir", dir},
			args...)...); o.status != statusUsage {
			t.Errorf("%v: %+v", args, o)
		}
	}
	if o := sluice(t, "bench", "posix", "--dir", dir+"/absent"); o.status != statusFailed ||
		!strings.Contains(o.stderr, "absent") {
		t.Errorf("%+v", o)
	}
}
