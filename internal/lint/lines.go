// SPDX-License-Identifier: Apache-2.0

package lint

import (
	"go/ast"
	"path"
	"regexp"
	"strings"
	"unicode/utf8"
)

const columnsMax = 100

// tabs are the columns of a tab, by the kind of file; 0: the rule is not for this kind.
var tabs = map[string]int{".go": 4, ".c": 8, ".h": 8, ".cu": 8, ".py": 4, ".md": 4}

// columns bounds lines. What cannot be broken may be longer: tables, links and code in documents,
// text in raw strings, directives of the compiler.
func columns(f *File) []Finding {
	tab := tabs[path.Ext(f.Path)]
	if tab == 0 || f.isGenerated() {
		return nil
	}
	raw := f.rawLines()
	var found []Finding
	number, code := 0, false
	for line := range strings.Lines(f.Text) {
		number++
		line = strings.TrimSuffix(line, "\n")
		if path.Ext(f.Path) == ".md" {
			if strings.HasPrefix(strings.TrimSpace(line), "```") {
				code = !code
			}
			if code || strings.HasPrefix(line, "|") || strings.Contains(line, "](") {
				continue
			}
		}
		wide := utf8.RuneCountInString(line) + strings.Count(line, "\t")*(tab-1)
		if wide > columnsMax && !raw[number] && !strings.HasPrefix(line, "//go:") {
			found = append(found, f.line(number, "%d columns of at most %d: break the line", wide,
				columnsMax))
		}
	}
	return found
}

// rawLines are the lines that raw strings begin, fill or end.
func (f *File) rawLines() map[int]bool {
	raw := map[int]bool{}
	if f.tree == nil {
		return raw
	}
	ast.Inspect(f.tree, func(n ast.Node) bool {
		s, ok := n.(*ast.BasicLit)
		if !ok || s.Value[0] != '`' {
			return true
		}
		for l := f.fset.Position(s.Pos()).Line; l <= f.fset.Position(s.End()).Line; l++ {
			raw[l] = true
		}
		return true
	})
	return raw
}

// The words are put together here so that this file does not contain them.
var foreign = regexp.MustCompile(`(?i)(` + strings.Join([]string{"par" + "cel", "sco" + "ut",
	"gr" + "ip",
	"rel" + "ief"}, "|") + `)`)

// unnamed are actors without a name.
var unnamed = regexp.MustCompile(`(?i)\b(` + strings.Join([]string{"who" + "ever", "no" + "body",
	"some" + "body"}, "|") + `)\b`)

// words wants one term for one thing, and that of the field.
func words(f *File) []Finding {
	var found []Finding
	number, inTests := 0, f.isTest() || strings.Contains(f.Path, "/tests/")
	for line := range strings.Lines(f.Text) {
		number++
		if word := foreign.FindString(line); word != "" {
			found = append(found, f.line(number, "%q is not a word of this house: take the "+
				"field's term (message, request, connection, peer)", word))
		}
		if word := unnamed.FindString(line); word != "" && !inTests {
			found = append(found, f.line(number, "%q names no actor: say which caller, peer or "+
				"thread is meant", word))
		}
	}
	return found
}
