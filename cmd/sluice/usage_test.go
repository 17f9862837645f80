// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestUsageErrors(t *testing.T) {
	cases := []struct {
		name string
		args []string
		want []string // in the message
	}{
		{"unknown command", []string{"transfer"}, []string{"transfer", "bench", "doctor", "explain",
			"replay", "version"}},
		{"unknown flag", []string{"bench", "--bach", "3"}, []string{"--bach"}},
		{"superfluous word", []string{"doctor", "now"}, []string{`"now"`}},
		{"unknown model", []string{"replay", "--model", "gpt-5"}, []string{"gpt-5", "llama3.1-8b",
			"deepseek-v3.2"}},
		{"unknown backend", []string{"replay", "--backend", "smoke"}, []string{"smoke", "auto",
			"shm"}},
		{"backend within a process", []string{"replay", "--backend", "mem"},
			[]string{"mem", "one process", "shm"}},
		{"transports of another backend", []string{"bench", "--backend", "shm", "--transports",
			"tcp"}, []string{"--transports", "ucx alone", "shm"}},
		{"devices of another backend", []string{"replay", "--backend", "shm", "--devices", "lo"},
			[]string{"--devices", "ucx and rdma", "shm"}},
		{"workers of another backend", []string{"explain", "--backend", "mem", "--workers", "2"},
			[]string{"--workers", "ucx alone", "mem"}},
		{"a port of another backend", []string{"replay", "--backend", "ucx", "--listen", ":1"},
			[]string{"--listen", "rdma alone", "ucx"}},
		{"a depth of another backend", []string{"bench", "--backend", "shm", "--depth", "16"},
			[]string{"--depth", "rdma alone", "shm"}},
		{"entries of all backends", []string{"explain", "--entries", "1"},
			[]string{"--entries", "rdma alone", "auto"}},
		{"devices of a peer of another backend", []string{"replay", "--peer-devices", "lo"},
			[]string{"--peer-devices", "rdma alone"}},
		{"a negative depth", []string{"replay", "--backend", "rdma", "--depth", "-1"},
			[]string{"--depth -1"}},
		{"a device without a name", []string{"replay", "--backend", "rdma", "--devices", ":1"},
			[]string{"--devices", "mlx5_0:1#3"}},
		{"an address without a port", []string{"bench", "--backend", "rdma", "--listen", "here"},
			[]string{"--listen", "host:port"}},
		{"a port for tcp of another backend", []string{"replay", "--backend", "ucx", "--tcp-listen",
			":1"}, []string{"--tcp-listen", "tcp alone", "ucx"}},
		{"plain text by accident", []string{"replay", "--backend", "tcp", "--tcp-listen", ":0"},
			[]string{"--tcp-cert", "--tcp-plaintext"}},
		{"half an identity", []string{"bench", "--backend", "tcp", "--tcp-cert", "c.pem"},
			[]string{"--tcp-key", "--tcp-ca"}},
		{"certificates that are not there", []string{"replay", "--backend", "tcp", "--tcp-cert",
			"/no/c", "--tcp-key", "/no/k", "--tcp-ca", "/no/a"}, []string{"--tcp-cert", "/no/c"}},
		{"too many connections", []string{"replay", "--backend", "tcp", "--tcp-conns", "65"},
			[]string{"Conns", "64"}},
		{"places of no pages", []string{"bench", "--gather"}, []string{"--gather", "--pages"}},
		{"too many workers", []string{"doctor", "--workers", "17"},
			[]string{"--workers 17", "1 to 16"}},
		{"transport with a blank", []string{"replay", "--backend", "ucx", "--transports", "a b"},
			[]string{"--transports", "a b"}},
		{"transports that connect nothing", []string{"bench", "--backend", "ucx", "--transports",
			"self"}, []string{"self", "posix", "tcp"}},
		{"transports and auto", []string{"replay", "--backend", "auto", "--transports", "self"},
			[]string{"--transports", "ucx alone", "auto"}},
		{"a backend of a running engine", []string{"explain", "--peer", "127.0.0.1:1",
			"--plaintext", "--backend", "tcp"}, []string{"--backend beside --peer"}},
		{"a memory of a running engine", []string{"explain", "--peer", "127.0.0.1:1",
			"--plaintext", "--local", "hbm"}, []string{"--local beside --peer"}},
		{"a table of one's own", []string{"bench", "--table", "--size", "64"},
			[]string{"--table", "--size"}},
		{"a table of notifications", []string{"bench", "--table", "--notify"},
			[]string{"--table", "--notify"}},
		{"a table within a process", []string{"bench", "--table", "--backend", "mem"},
			[]string{"two processes"}},
		{"hot pages", []string{"bench", "--hot", "--pages"}, []string{"--hot", "--pages"}},
		{"unknown bench backend", []string{"bench", "--backend", "smoke"},
			[]string{"smoke", "mem", "shm"}},
		{"unknown operation", []string{"bench", "--op", "move"}, []string{"move", "write", "read"}},
		{"bad size", []string{"bench", "--size", "5 apples"}, []string{"apples", "KiB"}},
		{"unknown workload", []string{"bench", "--workload", "gpt-5"},
			[]string{"gpt-5", "nixlbench", "llama3.1-8b"}},
		{"a layout that is none", []string{"bench", "--workload", "qwen3-8b/tp5"},
			[]string{"qwen3-8b", "5 ranks"}},
		{"a workload of one's own", []string{"bench", "--workload", "nixlbench", "--size", "64"},
			[]string{"--workload", "--size"}},
		{"a region that is neither", []string{"agent", "--listen", "127.0.0.1:0", "--plaintext",
			"--region", "kv=9XB"}, []string{"9XB", "1GiB", "file"}},
		{"a prompt of no workload", []string{"bench", "--tokens", "64"},
			[]string{"--tokens", "--workload"}},
		{"no prompt", []string{"bench", "--workload", "qwen3-8b", "--tokens", "0"},
			[]string{"--tokens 0"}},
		{"unknown backend of a workload", []string{"bench", "--workload", "nixlbench", "--backend",
			"smoke"}, []string{"smoke", "shm"}},
		{"no batch", []string{"bench", "--batch", "0"}, []string{"batch 0"}},
		{"unknown format", []string{"bench", "--format", "xml"}, []string{"xml", "text", "json",
			"gobench"}},
		{"a disk as a backend of bench", []string{"bench", "--backend", "posix"},
			[]string{"sluice bench posix --dir"}},
		{"a card as a backend of bench", []string{"bench", "--backend", "gds"},
			[]string{"sluice bench gds --dir"}},
		{"two formats", []string{"bench", "--json", "--format", "gobench"},
			[]string{"--json and --format gobench: want one of them"}},
		{"notifications within a process", []string{"bench", "--backend", "mem", "--notify"},
			[]string{"two processes"}},
		{"unknown memory of a side", []string{"bench", "--memory", "tape"},
			[]string{"tape", "backend", "host"}},
		{"unknown memory", []string{"explain", "--local", "tape"}, []string{"tape", "dram", "file",
			"hbm"}},
		{"abort rate", []string{"replay", "--abort-rate", "1.5"}, []string{"1.5", "0 to 1"}},
		{"speed", []string{"replay", "--speed", "-1"}, []string{"--speed"}},
		{"a fault that is none", []string{"replay", "--fault", "slow,wet"},
			[]string{"--fault", "wet", "flapping"}},
		{"faults of nobody", []string{"replay", "--fault", "slow", "--fault-side", "mine"},
			[]string{"--fault-side", "mine", "decode"}},
		{"no requests", []string{"replay", "--requests", "0"}, []string{"--requests"}},
		{"too many requests", []string{"replay", "--requests", "1000000000"},
			[]string{"--requests", "at most"}},
		{"empty trace name", []string{"replay", "--trace", ""}, []string{"--trace", "empty"}},
		{"speed that is no number", []string{"replay", "--speed", "nan"}, []string{"--speed"}},
		{"abort rate that is no number", []string{"replay", "--abort-rate", "nan"},
			[]string{"--abort-rate"}},
		{"many threads", []string{"replay", "--threads", "1000"}, []string{"1 to 64"}},
		{"negative threads", []string{"bench", "--threads", "-1"}, []string{"1 to 64"}},
		{"no size", []string{"bench", "--size", "0"}, []string{"too small"}},
		{"large size", []string{"bench", "--size", "99TiB"}, []string{"want 1 B to"}},
		{"large spread", []string{"bench", "--pages", "--spread", "99TiB"}, []string{"spread"}},
		{"large in all", []string{"bench", "--size", "1GiB", "--batch", "65536"},
			[]string{"in all"}},
		{"time that is no number", []string{"bench", "--seconds", "nan"}, []string{"--seconds"}},
		{"endless time", []string{"bench", "--seconds", "inf"}, []string{"--seconds"}},
		{"negative rounds", []string{"bench", "--rounds", "-1"}, []string{"--rounds"}},
		{"sweep of notifications", []string{"bench", "--notify", "--sweep"},
			[]string{"--notify", "--sweep"}},
		{"help for nothing", []string{"help", "transfer"}, []string{"transfer", "bench", "replay"}},
		{"help for too much", []string{"help", "bench", "transfer"}, []string{"transfer", "gather",
			"posix"}},
		{"an agent without certificates", []string{"agent", "--listen", ":0", "--region", "a=1KiB"},
			[]string{"--cert", "--plaintext"}},
		{"an agent with half of them", []string{"agent", "--listen", ":0", "--region", "a=1KiB",
			"--cert", "x"}, []string{"--key", "go together"}},
		{"an agent with nothing", []string{"agent", "--listen", ":0", "--plaintext"},
			[]string{"--region"}},
		{"an agent nowhere", []string{"agent", "--plaintext", "--region", "a=1KiB"},
			[]string{"--listen"}},
		{"a region without a name", []string{"agent", "--listen", ":0", "--plaintext", "--region",
			"1KiB"}, []string{"NAME=SIZE"}},
		{"a region twice", []string{"agent", "--listen", ":0", "--plaintext", "--region", "a=1KiB",
			"--region", "a=2KiB"}, []string{"twice"}},
		{"a region of no file", []string{"agent", "--listen", "127.0.0.1:0", "--plaintext",
			"--region", "a=/no/file"}, []string{"/no/file"}},
		{"a peer that is missing", []string{"ls", "--plaintext"}, []string{"--peer"}},
		{"a peer by no such backend", []string{"ls", "--plaintext", "--peer", "127.0.0.1:1",
			"--backend", "smoke"}, []string{`--backend "smoke": want some of shm, rdma, ucx, tcp`}},
		{"a peer by one backend twice", []string{"ls", "--plaintext", "--peer", "127.0.0.1:1",
			"--backend", "tcp,shm,tcp"}, []string{"--backend tcp", "twice"}},
		{"a negative length", []string{"get", "kv", "--plaintext", "--peer", "127.0.0.1:1",
			"--length", "-1"}, []string{"--length: -1 is negative: want 0 or more"}},
		{"a name that is missing", []string{"get", "--plaintext", "--peer", "127.0.0.1:1"},
			[]string{"name of a region"}},
		{"a certificate of no authority", []string{"keys", "issue", "/no/where", "x"},
			[]string{"sluice keys init"}},
		{"a member called ca", []string{"keys", "issue", "/no/where", "ca"},
			[]string{"authority's own"}},
		{"no validity", []string{"keys", "init", "/no/where", "--validity", "-1h"},
			[]string{"--validity"}},
		{"bad pool", []string{"replay", "--pool", "much"}, []string{"much"}},
		{"short limit", []string{"replay", "--timeout", "1ms"}, []string{"--timeout"}},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			o := sluice(t, tc.args...)
			if o.status != statusUsage || o.stdout != "" {
				t.Errorf("status %d, stdout %q", o.status, o.stdout)
			}
			for _, want := range append(tc.want, "Usage: sluice", "--help") {
				if !strings.Contains(o.stderr, want) {
					t.Errorf("no %q in:\n%s", want, o.stderr)
				}
			}
		})
	}
}

func TestHelpIsNoError(t *testing.T) {
	for _, args := range [][]string{{}, {"--help"}, {"bench", "--help"}, {"help"},
		{"help", "bench"}} {
		if o := sluice(t, args...); o.status != 0 || !strings.Contains(o.stdout, "Usage:") ||
			o.stderr != "" {
			t.Errorf("%v: %+v", args, o)
		}
	}
	if o := sluice(t, "--help"); strings.Contains(o.stdout, "peer ") {
		t.Errorf("the hidden command is shown:\n%s", o.stdout)
	}
}

func TestPeerIsNotForHands(t *testing.T) {
	if o := sluice(t, "peer", "replay-decode"); o.status != statusFailed ||
		!strings.Contains(o.stderr, "not by hand") {
		t.Errorf("%+v", o)
	}
	for _, args := range [][]string{{"peer"}, {"peer", "cook"}, {"peer", "replay-decode", "now"}} {
		if o := sluice(t, args...); o.status != statusUsage {
			t.Errorf("%v: %+v", args, o)
		}
	}
}

func TestBrokenTraceLineIsNumbered(t *testing.T) {
	good := `{"timestamp":0,"input_length":512,"output_length":1,"hash_ids":[1]}`
	for name, bad := range map[string]string{
		"no JSON":   "{",
		"too short": `{"timestamp":0,"input_length":2048,"output_length":1,"hash_ids":[1]}`,
		"no hashes": `{"timestamp":0,"input_length":512,"output_length":1}`,
	} {
		file := filepath.Join(t.TempDir(), "trace.jsonl")
		require.NoError(t, os.WriteFile(file, []byte(good+"\n\n"+bad+"\n"+good+"\n"), 0o644))
		o := sluice(t, "replay", "--trace", file, "--requests", "3")
		if o.status != statusFailed || !strings.Contains(o.stderr, "line 3") ||
			!strings.Contains(o.stderr, file) {
			t.Errorf("%s: %+v", name, o)
		}
	}
}

// TestFilesThatAreNoTrace: a binary, a directory, and one without an end.
func TestFilesThatAreNoTrace(t *testing.T) {
	for file, want := range map[string]string{binary: "line 1", filepath.Dir(binary): "directory",
		"/dev/zero": "line 1: longer"} {
		o := sluice(t, "replay", "--trace", file)
		if o.status != statusFailed || !strings.Contains(o.stderr, want) ||
			!strings.Contains(o.stderr, file) || len(o.stderr) > 300 {
			t.Errorf("%s: %+v", file, o)
		}
	}
}

// TestOutputThatCannotBeWritten: a full disk must not look like success.
func TestOutputThatCannotBeWritten(t *testing.T) {
	small := []string{"replay", "--model", smallModel, "--requests", "1", "--trace",
		smallTrace(t, 1)}
	for _, args := range [][]string{{"version"}, {"doctor"}, {"doctor", "--json"}, {"explain"},
		small, append(small, "--json"),
		{"bench", "--backend", "mem", "--rounds", "1", "--size", "64", "--batch", "1"}} {
		full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
		require.NoError(t, err)
		c, _, stderr := command(t, args...)
		c.Stdout = full
		if got := status(t, c.Run()); got != statusFailed ||
			!strings.Contains(stderr.String(), "no space left") {
			t.Errorf("%v: status %d, stderr %q", args, got, stderr)
		}
		full.Close()
	}
}

// TestSparseSurroundings: no environment, no temporary directory, no standard
// input, and few descriptors.
func TestSparseSurroundings(t *testing.T) {
	args := []string{"replay", "--model", smallModel, "--requests", "2", "--trace",
		smallTrace(t, 2)}
	c, stdout, stderr := command(t, "-c", "ulimit -n 64; exec <&-; exec \"$0\" \"$@\"", binary)
	c.Path, c.Args = "/bin/sh", append(append([]string{"sh"}, c.Args[1:]...), args...)
	c.Env = []string{"TMPDIR=/nonexistent"}
	if got := status(t, c.Run()); got != 0 || !strings.Contains(stdout.String(), "mismatches  0") {
		t.Errorf("status %d, stdout %q, stderr %q", got, stdout, stderr)
	}
}

func TestTraceProblemsAreSaid(t *testing.T) {
	file := filepath.Join(t.TempDir(), "trace.jsonl")
	if o := sluice(t, "replay", "--trace", file); o.status != statusFailed ||
		!strings.Contains(o.stderr, file) {
		t.Errorf("no file: %+v", o)
	}
	require.NoError(t, os.WriteFile(file, nil, 0o644))
	if o := sluice(t, "replay", "--trace", file, "--requests", "0"); o.status != statusFailed ||
		!strings.Contains(o.stderr, "no requests") {
		t.Errorf("empty trace: %+v", o)
	}
	if o := sluice(t, "replay", "--trace", file); o.status != statusFailed ||
		!strings.Contains(o.stderr, "no requests") {
		t.Errorf("empty trace: %+v", o)
	}
	if o := sluice(t, "replay", "--trace", file, "--requests", "2"); o.status != statusFailed ||
		!strings.Contains(o.stderr, "0 requests") {
		t.Errorf("short trace: %+v", o)
	}
}

func TestPoolThatIsTooSmall(t *testing.T) {
	o := sluice(t, "replay", "--model", smallModel, "--requests", "10", "--pool", "1MiB")
	if o.status != statusFailed || !strings.Contains(o.stderr, "--pool") ||
		!strings.Contains(o.stderr, "request ") {
		t.Errorf("%+v", o)
	}
	o = sluice(t, "replay", "--model", smallModel, "--requests", "1", "--pool", "900TiB")
	if o.status != statusFailed || !strings.Contains(o.stderr, "available") {
		t.Errorf("%+v", o)
	}
}
