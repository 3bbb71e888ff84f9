// The dashboards of a folder (this one's parent unless named), as Grafana's own packages see them: make dashboards-grafana
//
// Law: prints each complaint, or one line that says what was judged. The exit code is the number of complaints, at most 1.

import { readFileSync, readdirSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { VERSIONS as RUN, behaved } from './behaviour.mjs';
import { VERSIONS as TYPED, judged } from './types.mjs';

const folder = process.argv[2] ?? fileURLToPath(new URL('..', import.meta.url));
const names = readdirSync(folder).filter((name) => /^sidecar-.*\.json$/.test(name));
const boards = names.map((name) => JSON.parse(readFileSync(join(folder, name), 'utf8')));
const complaints = [...judged(boards), ...await behaved(boards)];
for (const each of complaints) console.log(each);
if (!complaints.length) {
  const panels = boards.flatMap((board) => board.panels).filter((panel) => panel.type !== 'row').length;
  console.log(`${panels} panels of ${boards.length} dashboards: the types of Grafana ${TYPED.join(', ')} know every key and value; `
    + `tables, units, colours and words come out right in the code of ${Object.keys(RUN).join(' and ')}`);
}
process.exitCode = complaints.length ? 1 : 0;
