// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// testPackage is a package that has tests of the chosen tier.
type testPackage struct {
	path, dir string
	tests     []string // names of the tests of the tier
	binary    string   // path of the compiled tests

	seconds  float64 // that they took before, from packages.txt
	computes bool    // they compute most of that time, rather than wait

	wall, processor time.Duration // of this run
}

// short is the path below the module.
func (p *testPackage) short() string {
	return strings.TrimPrefix(p.path, "github.com/sluicehq/sluice/")
}

// list returns the packages that have tests of the tier. It reads the names of tests from the
// sources, so that gotest does not compile a package without any.
func (o *options) list(ctx context.Context) ([]*testPackage, error) {
	args := []string{"list"}
	if o.race {
		args = append(args, "-race") // which files a package has depends on it
	}
	args = append(append(args, "-f", `{{.ImportPath}} {{.Dir}}{{range .TestGoFiles}} {{.}}`+
		`{{end}}{{range .XTestGoFiles}} {{.}}{{end}}`), o.patterns...)
	cmd := exec.CommandContext(ctx, o.tool, args...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	known := readTable()
	var all []*testPackage
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		p := &testPackage{path: fields[0], dir: fields[1], seconds: 1, computes: true}
		if row, ok := known[p.short()]; ok {
			p.seconds, p.computes = row.seconds, row.computes
		}
		for _, file := range fields[2:] {
			text, err := os.ReadFile(filepath.Join(p.dir, file))
			if err != nil {
				return nil, err
			}
			for _, m := range testName.FindAllSubmatch(text, -1) {
				if name := string(m[1]); name != "TestMain" && o.belongs(name) {
					p.tests = append(p.tests, name)
				}
			}
		}
		if len(p.tests) > 0 {
			slices.Sort(p.tests)
			all = append(all, p)
		}
	}
	slices.SortFunc(all, func(a, b *testPackage) int {
		return cmp.Or(cmp.Compare(b.seconds, a.seconds), cmp.Compare(a.path, b.path))
	})
	return all, nil
}

var testName = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Example)\w*)\(`)

// choose returns the packages with the tests of the shard alone.
func (o *options) choose(all []*testPackage) ([]*testPackage, error) {
	if o.shard == "" {
		return all, nil
	}
	var k, n int
	if _, err := fmt.Sscanf(o.shard, "%d/%d", &k, &n); err != nil || n < 1 || k < 0 || k >= n {
		return nil, fmt.Errorf("-shard %s: want K/N with 0 <= K < N", o.shard)
	}
	slices.SortFunc(all, func(a, b *testPackage) int { return cmp.Compare(a.path, b.path) })
	number := 0
	for _, p := range all {
		p.tests = slices.DeleteFunc(p.tests, func(string) bool {
			number++
			return (number-1)%n != k
		})
	}
	return slices.DeleteFunc(all, func(p *testPackage) bool { return len(p.tests) == 0 }), nil
}

// compile builds the test binaries. The go command names a binary after the last element of the
// package's path, so that one call can build only packages that differ in it.
func (o *options) compile(ctx context.Context, dir string, list []*testPackage) error {
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	for group, left := 0, list; len(left) > 0; group++ {
		names, rest := map[string]bool{}, []*testPackage(nil)
		to := filepath.Join(dir, fmt.Sprint(group))
		if err := os.MkdirAll(to, 0o755); err != nil {
			return err
		}
		args := []string{"test", "-c", "-vet=off", "-o", to + "/"}
		if o.race {
			args = append(args, "-race")
		}
		for _, p := range left {
			name := path.Base(p.path)
			if names[name] {
				rest = append(rest, p)
				continue
			}
			names[name] = true
			p.binary = filepath.Join(to, name+".test")
			args = append(args, p.path)
		}
		cmd := exec.CommandContext(ctx, o.tool, args...)
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("go test -c: %w", err)
		}
		left = rest
	}
	return nil
}

// table is the file with the time and the kind of each package, from the repository's root.
const table = "hack/gotest/packages.txt"

// tableHead is the comment at the top of table.
const tableHead = `# What the tests of a package take: seconds of the longest run, and whether they compute or wait
# for the most part. hack/gotest runs the longest first. gotest -update writes it.
`

type row struct {
	seconds  float64
	computes bool
}

// readTable returns the rows of the table by package, none if there is no table.
func readTable() map[string]row {
	known := map[string]row{}
	text, _ := os.ReadFile(table)
	for line := range strings.Lines(string(text)) {
		var name, kind string
		var seconds float64
		if n, _ := fmt.Sscanf(line, "%s %f %s", &name, &seconds, &kind); n == 3 {
			known[name] = row{seconds, kind == "computes"}
		}
	}
	return known
}

// writeTable writes what this run has measured into the table, and keeps the other rows.
func writeTable(list []*testPackage) error {
	known := readTable()
	for _, p := range list {
		known[p.short()] = row{p.wall.Seconds(), p.processor > p.wall*6/10}
	}
	text := tableHead
	for _, name := range slices.Sorted(maps.Keys(known)) {
		kind := "waits"
		if known[name].computes {
			kind = "computes"
		}
		text += fmt.Sprintf("%s %.0f %s\n", name, known[name].seconds, kind)
	}
	return os.WriteFile(table, []byte(text), 0o644)
}
